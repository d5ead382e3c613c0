"""Stands between a worker and its SGLang server, so that nothing of the server outlives the worker and no key leaks.

    python -m nemo_rl.models.generation.sglang.server_supervisor PARENT_PID COMMAND... < KEYS

SGLang's own processes ask the kernel to die with their parent, but only after some seconds of imports, and the kernel
means the parent *thread*, while workers start servers from pool threads. This process watches the worker instead,
adopts whatever the server leaves behind, and ends it all. It imports little: it lives as long as the server.

The keys come over stdin and go on to the server in a `KeyFile`, named by `--config` at the end of the command. The
server prints them with its arguments: its output passes through here, and what this process prints has none. The
server's ranks find each other through a file, too.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from nemo_rl.models.generation.sglang.key_file import KeyFile
from nemo_rl.models.generation.sglang.redaction import Redactor

POLL_INTERVAL_S = 0.2
TERMINATE_TIMEOUT_S = 3.0
"""SGLang drains its requests on SIGTERM, which may take minutes: nobody waits for them here."""
TRACKER_TIMEOUT_S = 3.0
OUTPUT_TIMEOUT_S = 3.0
"""For the rest of the output, once no process of the server is left."""
PRIVATE_PREFIX = "nemo_rl_"
"""Of the folder for what only this user may see, under the folder for temporary files."""
_CHUNK_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def supervise(parent_pid: int, command: list[str], keys: dict[str, str]) -> int:
    """Run `command` until it ends, the parent is gone or SIGTERM comes; return its exit status.

    Args:
        keys: the server's options that are secret, such as `api-key`, without the leading dashes.
    """
    stop_requests: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: stop_requests.append(received))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with (
        tempfile.TemporaryDirectory(prefix=PRIVATE_PREFIX, ignore_cleanup_errors=True) as folder,
        KeyFile(Path(folder), keys) as key_file,
    ):
        server, output = _start([*command, "--config", str(key_file.path)], folder, keys)
        try:
            while server.poll() is None and os.getppid() == parent_pid and not stop_requests:
                key_file.hand_over()
                time.sleep(POLL_INTERVAL_S)
        finally:  # also when the file is gone, or cannot be opened
            key_file.delete()
            if server.poll() is None:
                _terminate(server)
            _kill_descendants()
    output.join(OUTPUT_TIMEOUT_S)
    return server.wait()


def _start(command: list[str], folder: str, keys: dict[str, str]) -> tuple[subprocess.Popen[bytes], threading.Thread]:
    """The server, and the thread that passes its output on; `folder`: private to this user."""
    server = subprocess.Popen(
        command,
        # torch's TCP store would listen on every interface and let anybody in.
        env={**os.environ, "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{folder}/ranks"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Its sockets between processes are files in the folder for temporary files.
        umask=0o077,
        preexec_fn=_die_with_supervisor,
    )
    if server.stdout is None:
        raise AssertionError("a process started with stdout=PIPE has a stdout")
    arguments = (server.stdout.fileno(), sys.stdout.fileno(), Redactor(keys.values()))
    output = threading.Thread(target=_pass_on, args=arguments, daemon=True)
    output.start()
    return server, output


def _pass_on(source: int, target: int, redactor: Redactor) -> None:
    """Copy until every writer has closed its end; a line may have any length, or no end."""
    while chunk := os.read(source, _CHUNK_BYTES):
        _write(target, redactor.feed(chunk))
    _write(target, redactor.finish())


def _write(target: int, text: bytes) -> None:
    try:
        while text:
            text = text[os.write(target, text) :]
    except OSError:
        # A full disk must not stop the server, which would block on its own output if nobody read it. The text is
        # lost: the log is where one would say so.
        return


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
    sys.exit(supervise(int(sys.argv[1]), sys.argv[2:], json.load(sys.stdin)))
