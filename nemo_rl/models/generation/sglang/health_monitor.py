"""Looks after the engines while they generate."""

import asyncio
import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx

from nemo_rl.config.schema import SGLangFaultToleranceConfig

logger = logging.getLogger(__name__)

_GENERATES = "/health_generate"
"""Generates one token where the engine is idle. Open to everybody, so it takes no key."""
_SETTLE_S = 2.0
"""For engines that are well to answer a check that is under way: those that hang hold up neither a refit nor the end."""
_OWN_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
"""A socket that this process could not open says nothing about the engine."""


@dataclass(frozen=True)
class Health:
    fault: str = ""
    """Empty: none."""
    is_gone: bool = False
    """Nobody listens there."""


async def check_engines(
    urls: Mapping[str, str], endpoint: str, headers: Mapping[str, str], timeout_s: float
) -> dict[str, Health]:
    """Ask all engines at once; `urls` by name. Takes `timeout_s` at most."""
    async with httpx.AsyncClient(trust_env=False, headers=headers) as http:
        checks = [_check(http, url + endpoint, timeout_s) for url in urls.values()]
        return dict(zip(urls, await asyncio.gather(*checks), strict=True))


async def _check(http: httpx.AsyncClient, url: str, timeout_s: float) -> Health:
    try:
        async with asyncio.timeout(timeout_s):
            response = await http.get(url, timeout=timeout_s)
    except httpx.ConnectError as error:
        if (own := _own_fault(error)) is not None:
            return Health(f"no connection from here: {error}: {own}")
        return Health(f"nobody listens: {error}", is_gone=True)
    except (TimeoutError, httpx.TimeoutException):
        return Health(f"no answer to a health check within {timeout_s:g} s")
    except httpx.HTTPError as error:
        return Health(f"no answer to a health check: {type(error).__name__}: {error}")
    return Health() if response.is_success else Health(f"HTTP {response.status_code} to a health check")


def _own_fault(error: BaseException | None) -> OSError | None:
    while error is not None:
        if isinstance(error, OSError) and error.errno in _OWN_FAULTS:
            return error
        error = error.__cause__ or error.__context__
    return None


class HealthMonitor:
    """A thread of the driver. It begins suspended, and is suspended while a refit owns the engines.

    A check generates a token: a paused engine could not answer it, and would look dead.
    """

    def __init__(
        self,
        config: SGLangFaultToleranceConfig,
        engines: Callable[[], Mapping[str, str]],
        on_dead: Callable[[str, str], None],
    ) -> None:
        """Make the monitor; `start` starts it.

        Args:
            engines: tells the URL of every engine that should be alive, by name.
            on_dead: called in the monitor's thread with the name and what is wrong.
        """
        self._config = config
        self._engines = engines
        self._on_dead = on_dead
        self._num_failures: Counter[str] = Counter()
        self._suspended = True
        self._num_suspensions = 0
        self._stopped = threading.Event()
        self._round = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def suspend(self) -> None:
        """When this returns no check begins, and one that is still under way is not judged any more."""
        self._suspended = True
        if self._round.acquire(timeout=_SETTLE_S):
            self._round.release()
        self._num_suspensions += 1

    def resume(self) -> None:
        self._suspended = False

    def stop(self) -> None:
        """Idempotent."""
        self._stopped.set()
        self.suspend()

    def _run(self) -> None:
        wait_s = self._config.health_check_first_wait_s
        while not self._stopped.wait(wait_s):
            wait_s = self._config.health_check_interval_s
            with self._round:
                if not self._suspended:
                    self._check_all_or_say()

    def _check_all_or_say(self) -> None:
        try:
            self._check_all()
        except Exception as error:  # noqa: BLE001 whatever it is, the thread has to look again
            logger.warning("a health check broke off: %s: %s", type(error).__name__, error)

    def _check_all(self) -> None:
        num_suspensions = self._num_suspensions
        healths = asyncio.run(check_engines(self._engines(), _GENERATES, {}, self._config.health_check_timeout_s))
        for name, health in healths.items():
            if num_suspensions != self._num_suspensions:
                return
            if not health.fault:
                del self._num_failures[name]
                continue
            self._num_failures[name] += 1
            logger.warning("%s: %s (%d in a row)", name, health.fault, self._num_failures[name])
            if health.is_gone or self._num_failures[name] >= self._config.health_check_max_failures:
                self._on_dead(name, health.fault)
