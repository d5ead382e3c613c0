"""One SGLang server as a process: start it, wait until it serves, end it with everything it started."""

import logging
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import httpx
import psutil

logger = logging.getLogger(__name__)

_SUPERVISOR = "nemo_rl.models.generation.sglang.server_supervisor"
_POLL_INTERVAL_S = 0.5
_PROBE_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 15.0
_NUM_LOG_LINES = 30


class ServerStartError(RuntimeError):
    """The server died or was not healthy in time; the message ends with the last lines of its log."""


class ServerProcess:
    """A server under a supervisor (see `server_supervisor`). Used by one worker, from any of its threads."""

    def __init__(self, command: list[str], environment: Mapping[str, str], log_file: Path, url: str) -> None:
        """Start the process; returns at once.

        Raises:
            OSError: the log file cannot be written.
        """
        self.url = url
        self.log_file = log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-m", _SUPERVISOR, str(os.getpid()), *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal ends the driver, and that ends this, in order.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the supervisor, the ancestor of everything that belongs to the server."""
        return self._supervisor.pid

    def is_alive(self) -> bool:
        return self._supervisor.poll() is None

    def wait_until_healthy(self, timeout_s: float) -> None:
        """Return when the server answers a health check, which generates one token.

        Raises:
            ServerStartError: it died, or the time is over; the process is ended in both cases.
        """
        start_s = time.monotonic()
        while not self._is_healthy():
            waited_s = time.monotonic() - start_s
            status = self._supervisor.poll()
            if status is not None:
                raise ServerStartError(f"{self._name()} ended with status {status} while starting{self._log_tail()}")
            if waited_s > timeout_s:
                self.stop()
                raise ServerStartError(
                    f"{self._name()} was not healthy after {waited_s:.0f} s "
                    f"(policy.generation.sglang_cfg.sglang_server_config.startup_timeout_s: {timeout_s:g})"
                    f"{self._log_tail()}"
                )
            time.sleep(_POLL_INTERVAL_S)
        logger.info("SGLang server %s is up after %.0f s, log %s", self.url, time.monotonic() - start_s, self.log_file)

    def stop(self) -> None:
        """End the server and all its children, and wait until they are gone. Idempotent."""
        if not self.is_alive():
            return
        family = psutil.Process(self.pid).children(recursive=True)
        self._supervisor.terminate()
        try:
            self._supervisor.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("the supervisor of %s did not end in %.0f s and is killed", self.url, _STOP_TIMEOUT_S)
            self._supervisor.kill()
            self._supervisor.wait()
            for process in family:
                _kill(process)

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=_PROBE_TIMEOUT_S, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def _name(self) -> str:
        return f"SGLang server {self.url}"

    def _log_tail(self) -> str:
        with self.log_file.open(errors="replace") as log:
            lines = deque(log, maxlen=_NUM_LOG_LINES)
        return f"; end of {self.log_file}:\n{''.join(lines)}"


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        logger.debug("process %d had ended", process.pid)
