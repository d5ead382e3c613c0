"""Stands between a worker and its SGLang server, so that nothing of the server outlives the worker.

    python -m nemo_rl.models.generation.sglang.server_supervisor PARENT_PID COMMAND...

SGLang's own processes ask the kernel to die with their parent, but only after some seconds of imports, and the kernel
means the parent *thread*, while workers start servers from pool threads. This process watches the worker instead,
adopts whatever the server leaves behind, and ends it all. It imports little: it lives as long as the server.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

import psutil

POLL_INTERVAL_S = 0.2
TERMINATE_TIMEOUT_S = 3.0
"""SGLang drains its requests on SIGTERM, which may take minutes: nobody waits for them here."""
TRACKER_TIMEOUT_S = 3.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def supervise(parent_pid: int, command: list[str]) -> int:
    """Run `command` until it ends, the parent is gone or SIGTERM comes; return its exit status."""
    stop_requests: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: stop_requests.append(received))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_supervisor)
    while server.poll() is None and os.getppid() == parent_pid and not stop_requests:
        time.sleep(POLL_INTERVAL_S)
    if server.poll() is None:
        _terminate(server)
    _kill_descendants()
    return server.wait()


def _terminate(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(TERMINATE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()


def _kill_descendants() -> None:
    """Orphans of the server are children of this process, so killing until none is left misses nothing."""
    trackers_end_s = time.monotonic() + TRACKER_TIMEOUT_S
    while descendants := psutil.Process().children(recursive=True):
        for process in descendants:
            if time.monotonic() > trackers_end_s or not _is_resource_tracker(process):
                process.kill()
        psutil.wait_procs(descendants, timeout=0.2)


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Python's own: it ends by itself after the others, and unlinks the shared memory that they leave behind."""
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False


def _die_with_supervisor() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


if __name__ == "__main__":
    sys.exit(supervise(int(sys.argv[1]), sys.argv[2:]))
