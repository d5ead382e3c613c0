"""Which engine a request goes to, and who is still alive after one has failed."""

import asyncio
import logging
import math
import threading
from collections.abc import Sequence

import httpx

from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.models.generation.interfaces import EnginesFailedError, EnginesLostError
from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.engine_pool import Engine, EnginePool, EngineState
from nemo_rl.models.generation.sglang.health_monitor import check_engines
from nemo_rl.models.generation.sglang.http_client import EngineError
from nemo_rl.models.generation.sglang.sampler import Endpoint
from nemo_rl.models.generation.sglang.sglang_router import SGLangRouter

logger = logging.getLogger(__name__)

_LIVENESS = "/model_info"
"""Answered by the server's front process; generates nothing, so a paused engine answers too."""
_LIVENESS_TIMEOUT_S = 5.0
_ROUTER_TIMEOUT_S = 10.0


class EngineDispatcher:
    """Implements `Dispatcher`. Calls may come from any thread.

    A request goes to the router, where there is one. If it fails it goes to the engines themselves, one after the other,
    so that it meets another engine than before, and the name of one that fails again is known.
    """

    def __init__(self, pool: EnginePool, keys: AccessKeys) -> None:
        self.router: SGLangRouter | None = None
        self._pool = pool
        self._headers = keys.headers(admin=False)
        self._serving: tuple[Engine, ...] = ()
        self._lock = threading.RLock()
        """Of what is served and of what the router is told about it."""

    @property
    def num_engines(self) -> int:
        return len(self._ready())

    def choose(self, index: int, attempt: int) -> Endpoint:
        """See `Dispatcher`."""
        engines = self._ready()
        if self.router is not None and attempt == 0:
            return Endpoint(self.router.name, self.router.url)
        engine = engines[(index + attempt) % len(engines)]
        return Endpoint(engine.name, engine.url)

    def report(self, endpoint: Endpoint, attempt: int, error: EngineError) -> None:
        """See `Dispatcher`. An engine that fails a request that has failed before is taken for dead."""
        named = [engine for engine in self._serving if engine.name == endpoint.name]
        # One that cannot be reached at all is looked at below: it may be this process that has no socket left.
        if attempt > 0 and named and not isinstance(error.__cause__, httpx.ConnectError):
            self.lose(endpoint.name, f"fails requests: {error.text}")
        urls = {engine.name: engine.url for engine in self._in_service()}
        for name, health in asyncio.run(check_engines(urls, _LIVENESS, self._headers, _LIVENESS_TIMEOUT_S)).items():
            if health.is_gone:
                self.lose(name, health.fault)
        self._ready()
        with self._lock:
            if self._revive_router(math.inf):
                self._tell_router(Deadline(_ROUTER_TIMEOUT_S))

    def serve(self, engines: Sequence[Engine], deadline: Deadline) -> None:
        """Send requests to these engines and no others from now on.

        Raises:
            EnginesFailedError: the router does not reach some of them.
        """
        with self._lock:
            self._serving = tuple(engines)
            self._revive_router(deadline.remaining_s())
            if missing := self._tell_router(deadline):
                raise EnginesFailedError(dict.fromkeys(missing, "the router does not reach it"))

    def withdraw(self, engine: Engine) -> None:
        """Send no more requests to this engine."""
        with self._lock:
            if engine not in self._serving:
                return
            self._serving = tuple(other for other in self._serving if other is not engine)
            try:
                self._tell_router(Deadline(_ROUTER_TIMEOUT_S))
            except (EngineError, TimeoutError) as error:
                # Requests that still get there fail, and are sent again.
                logger.warning("the router could not be told that %s is gone: %s", engine.name, error)

    def lose(self, name: str, fault: str) -> None:
        """Take an engine for dead: end it, and with it every request that it still has."""
        (engine,) = self._pool.find([name])
        if self._pool.end(engine, fault):
            logger.warning("%s is taken for dead: %s", name, fault)
        self.withdraw(engine)

    def name_engine(self, error: EngineError) -> EngineError:
        """The same error under the name of the engine that the router speaks of, where it does."""
        for engine in self._serving:
            if f"{engine.url}/" in error.text:
                return EngineError(engine.name, error.endpoint, error.status, error.text)
        return error

    def _tell_router(self, deadline: Deadline) -> list[str]:
        """Names of engines that the router does not reach."""
        if self.router is None:
            return []
        names = {engine.url: engine.name for engine in self._serving}
        return [names[url] for url in self.router.set_engines(names, deadline)]

    def _revive_router(self, limit_s: float) -> bool:
        """Whether it had ended and is new: it knows no engine then."""
        if self.router is None or self.router.is_alive():
            return False
        logger.warning("the router has ended and is started again; its log is in the run folder")
        self.router.start(limit_s)
        return True

    def _in_service(self) -> list[Engine]:
        return [engine for engine in self._serving if engine.state is EngineState.READY]

    def _ready(self) -> list[Engine]:
        engines = self._in_service()
        if not engines:
            raise EnginesLostError(self._pool.faults())
        return engines
