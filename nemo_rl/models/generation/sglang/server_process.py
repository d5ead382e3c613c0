"""One SGLang server as a process: start it, wait until it serves, end it with everything it started."""

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import psutil

from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.utils.network import http_url
from nemo_rl.utils.ports import ReservedPort

logger = logging.getLogger(__name__)

_SUPERVISOR = "nemo_rl.models.generation.sglang.server_supervisor"
_POLL_INTERVAL_S = 0.5
_PROBE_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 15.0
_NUM_LOG_LINES = 30
_NUM_ATTEMPTS = 3
"""A reserved port can still be lost: to another address of the machine, or to whoever also sets SO_REUSEADDR."""
_PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE|port is already in use", re.IGNORECASE)


class ServerStartError(RuntimeError):
    """The server died or was not healthy in time; the message ends with the last lines of its log."""


class PortTakenError(ServerStartError):
    """It died because something else has one of its ports; other ports may do."""


class ServerProcess:
    """A server under a supervisor (see `server_supervisor`). Used by one worker, from any of its threads."""

    def __init__(
        self,
        command: list[str],
        environment: Mapping[str, str],
        log_file: Path,
        host: str,
        port: int,
        keys: AccessKeys,
    ) -> None:
        """Start the process; returns at once.

        Args:
            command: gets `--config FILE` appended, where FILE holds the keys; see `KeyFile`.
            log_file: appended to; never holds a key.
            host, port: where the command tells the server to listen.

        Raises:
            OSError: the log file cannot be written.
        """
        self.url = http_url(host, port)
        self.log_file = log_file
        self._port = port
        self._listens = False
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            self._log_start = log.tell()
            self._supervisor = subprocess.Popen(
                [sys.executable, "-m", _SUPERVISOR, str(os.getpid()), *command],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal ends the driver, and that ends this, in order.
                start_new_session=True,
            )
        self._send_keys(keys)

    def _send_keys(self, keys: AccessKeys) -> None:
        """Over a pipe: a command line and an environment can be read by others."""
        pipe = self._supervisor.stdin
        if pipe is None:
            raise AssertionError("a process started with stdin=PIPE has a stdin")
        try:
            with pipe:
                pipe.write(json.dumps(keys.options()).encode())
        except BrokenPipeError:
            logger.warning("the supervisor of %s ended before it had its keys", self.url)

    @property
    def pid(self) -> int:
        """Process id of the supervisor, the ancestor of everything that belongs to the server."""
        return self._supervisor.pid

    def is_alive(self) -> bool:
        return self._supervisor.poll() is None

    def wait_until_healthy(self, timeout_s: float) -> None:
        """Return when the server answers a health check, which generates one token.

        Raises:
            PortTakenError: it died of that.
            ServerStartError: it died, or the time is over; the process is ended in both cases.
        """
        start_s = time.monotonic()
        while not (self._is_listening() and self._is_healthy()):
            waited_s = time.monotonic() - start_s
            status = self._supervisor.poll()
            if status is not None:
                kind = PortTakenError if _PORT_TAKEN.search(self._log_text()) else ServerStartError
                raise kind(f"{self._name()} ended with status {status} while starting{self._log_tail()}")
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

    def _is_listening(self) -> bool:
        """Whether a process of this server has its port: another program may have been faster, and answer."""
        if not self._listens:
            try:
                family = psutil.Process(self.pid).children(recursive=True)
                self._listens = any(_listens_on(process, self._port) for process in family)
            except psutil.NoSuchProcess:
                self._listens = False
        return self._listens

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=_PROBE_TIMEOUT_S, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def _name(self) -> str:
        return f"SGLang server {self.url}"

    def _log_text(self) -> str:
        """What this process has written; others may have used the file before."""
        with self.log_file.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def _log_tail(self) -> str:
        lines = self._log_text().splitlines(keepends=True)[-_NUM_LOG_LINES:]
        return f"; end of {self.log_file}:\n{''.join(lines)}"


def start_on_free_ports(host: str, timeout_s: float, launch: Callable[[int, int], ServerProcess]) -> ServerProcess:
    """A healthy server on ports of `host`; on others if something else takes one of them in the meantime.

    Args:
        timeout_s: for all attempts together.
        launch: starts a server, given two ports.

    Raises:
        PortTakenError: that happened in every attempt.
        ServerStartError: see `ServerProcess.wait_until_healthy`.
    """
    start_s, left_s = time.monotonic(), timeout_s
    for attempt in range(1, _NUM_ATTEMPTS):
        try:
            return _start(host, left_s, launch)
        except PortTakenError as error:
            what = str(error).partition(" ended")[0]
            logger.warning("%s lost a port to another program; attempt %d of %d", what, attempt + 1, _NUM_ATTEMPTS)
        left_s = timeout_s - (time.monotonic() - start_s)
    return _start(host, left_s, launch)


def _start(host: str, timeout_s: float, launch: Callable[[int, int], ServerProcess]) -> ServerProcess:
    # Held until the server listens, so that no other process gets the ports while it imports.
    with ReservedPort(host) as first, ReservedPort(host) as second:
        process = launch(first.number, second.number)
        process.wait_until_healthy(timeout_s)
    return process


def _listens_on(process: psutil.Process, port: int) -> bool:
    connections = process.net_connections(kind="tcp")
    return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        logger.debug("process %d had ended", process.pid)
