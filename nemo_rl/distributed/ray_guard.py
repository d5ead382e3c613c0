"""Ends the Ray that a driver has started, when the driver is gone without having done so.

    python -m nemo_rl.distributed.ray_guard DRIVER_PID MARK

Ray's main daemons ask the kernel to die with the driver. Their agents look for their parent only once they are
connected, so a driver killed while they start leaves them behind for minutes; workers take seconds. This process, a
child of the driver in a session of its own, notes everything that descends from a marked process. It imports little.
"""

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil

MARK_VARIABLE = "NRL_RAY_MARK"
"""In the environment of what is guarded."""
POLL_INTERVAL_S = 0.5
ORDERLY_END_S = 12.0
"""Supervisors of servers are in sessions of their own, and end what they watch once their actor is gone."""
KILLED_END_S = 3.0


@contextmanager
def guarded() -> Iterator[None]:
    """What is started in this block ends soon after this process, whatever ends it."""
    mark = uuid.uuid4().hex
    guard = subprocess.Popen(
        [sys.executable, "-m", "nemo_rl.distributed.ray_guard", str(os.getpid()), mark],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Neither Ctrl-C nor the end of the terminal may end it before the driver.
        start_new_session=True,
    )
    # It ends when Ray does, which may be long before this process.
    threading.Thread(target=guard.wait, daemon=True).start()
    os.environ[MARK_VARIABLE] = mark
    try:
        yield
    finally:
        del os.environ[MARK_VARIABLE]


def watch(driver_pid: int, mark: str) -> None:
    """Return when nothing that is marked is left, or nothing can be done about it."""
    known: set[psutil.Process] = set()
    session = None
    while os.getppid() == driver_pid:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):  # it ends now: the loop does, too
            session = session or os.getsid(driver_pid)
            _note(known, psutil.Process(driver_pid).children(recursive=True), mark)
        if known and not any(map(_is_alive, known)):
            return
        time.sleep(POLL_INTERVAL_S)
    _end(known, mark, session)


def _end(known: set[psutil.Process], mark: str, session: int | None) -> None:
    """Kill Ray's own, which are in the driver's session, at once; servers once they have had their time."""
    start_s = time.monotonic()
    while (waited_s := time.monotonic() - start_s) < ORDERLY_END_S + KILLED_END_S:
        # Without the driver there is no tree. One too new to be known has not yet overwritten its environment.
        _note(known, psutil.process_iter(), mark)
        left = [process for process in known if _is_alive(process)]
        if not left:
            return
        for process in left:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                if waited_s > ORDERLY_END_S or os.getsid(process.pid) == session:
                    process.kill()
        time.sleep(POLL_INTERVAL_S)


def _note(known: set[psutil.Process], candidates: Iterable[psutil.Process], mark: str) -> None:
    """Add those that carry the mark or are children of known ones; Ray's agents overwrite their environment."""
    pids = {process.pid for process in known}
    for process in candidates:
        with suppress(psutil.Error):
            if process not in known and (process.ppid() in pids or process.environ().get(MARK_VARIABLE) == mark):
                known.add(process)
                pids.add(process.pid)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2])
