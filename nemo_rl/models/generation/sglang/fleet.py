"""Keeps the engines of a run: starts them, watches them, replaces, adds and removes them."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray

from nemo_rl.config.layout import Layout
from nemo_rl.config.schema import PolicyConfig
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.models.generation.interfaces import EnginesFailedError, ReplacementsUsedUpError
from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.dispatcher import EngineDispatcher
from nemo_rl.models.generation.sglang.engine_control import EngineControl
from nemo_rl.models.generation.sglang.engine_pool import Engine, EnginePool, EngineState, Place
from nemo_rl.models.generation.sglang.health_monitor import HealthMonitor
from nemo_rl.models.generation.sglang.sglang_router import SGLangRouter
from nemo_rl.models.generation.sglang.sglang_worker import SGLangGenerationWorker

logger = logging.getLogger(__name__)

_ACTOR_START_S = 120.0
"""For the actor's process and its imports, before its server starts."""
_MAX_REPLACEMENTS = "policy.generation.sglang_cfg.sglang_fault_tolerance_config.max_replacements"
_LOOPBACK = "127.0.0.1"


def shared_host(layout: Layout) -> str | None:
    """Where every server of the run listens; None: each at its own node's address.

    A run of one node may be on a Ray cluster of several, which places engines where it likes.
    """
    num_alive = sum(bool(node["Alive"]) for node in ray.nodes())
    return _LOOPBACK if layout.num_nodes == 1 and num_alive == 1 else None


class EngineFleet:
    """Made without engines; `launch` starts them.

    Engines come and go between refits only. From then until `serve` none is checked: the group that forms next takes
    their schedulers.
    """

    def __init__(
        self,
        *,
        cfg: PolicyConfig,
        layout: Layout,
        device: str,
        keys: AccessKeys,
        worker_class: type[SGLangGenerationWorker],
    ) -> None:
        self._cfg = cfg
        self._tolerance = cfg.generation.sglang_cfg.sglang_fault_tolerance_config
        self._layout = layout
        self._device = device
        self._keys = keys
        self._worker_class = worker_class
        self._pool = EnginePool(self._make_actor, self._make_control)
        self.dispatcher = EngineDispatcher(self._pool, keys)
        self._monitor = HealthMonitor(self._tolerance, self._ready_urls, self.dispatcher.lose)
        self._model_folder = self._log_folder = Path()
        self._num_replaced = 0

    def launch(self, cluster: RayVirtualCluster, *, model_folder: Path, log_folder: Path) -> None:
        """Start one actor and one server per bundle; returns at once."""
        self._model_folder, self._log_folder = model_folder, log_folder
        self._pool.add_places(cluster)
        self._pool.start(self._pool.free_places())

    def _make_actor(self, options: dict[str, Any], number: int) -> Any:
        actor_class: Any = ray.remote(self._worker_class)
        return actor_class.options(**options).remote(
            cfg=self._cfg,
            engine_index=number,
            model_folder=str(self._model_folder),
            tokenizer_folder=self._cfg.tokenizer.name,
            device=self._device,
            log_dir=str(self._log_folder),
            host=shared_host(self._layout),
            keys=self._keys,
            shares_gpu=self._layout.shares_gpus,
            meets_rank0=self._layout.meets_rank0,
        )

    def _make_control(self, number: int, url: str) -> EngineControl:
        server = self._cfg.generation.sglang_cfg.sglang_server_config
        return EngineControl(f"engine {number}", url, server.refit_timeout_s, self._keys)

    def wait_ready(self) -> None:
        """Return when every server answers, and the router where there are several.

        Raises:
            EnginesFailedError: with the end of the server's log.
            ServerStartError: with the end of the router's log.
        """
        timeout_s = self._cfg.generation.sglang_cfg.sglang_server_config.startup_timeout_s + _ACTOR_START_S
        self._pool.wait_ready(self._pool.in_state(EngineState.STARTING), timeout_s)
        if len(self.ready()) > 1:
            self._start_router()
        self.dispatcher.serve(self.ready(), Deadline(timeout_s))
        if self._tolerance.use_fault_tolerance:
            self._monitor.start()

    def _start_router(self) -> None:
        host = shared_host(self._layout) or ray.util.get_node_ip_address()
        log_file = self._log_folder / "sglang_router.log"
        router = SGLangRouter(cfg=self._cfg, keys=self._keys, host=host, log_file=log_file)
        router.start()
        self.dispatcher.router = router

    def ready(self) -> list[Engine]:
        """In the order of their ranks."""
        return self._pool.in_state(EngineState.READY)

    def _ready_urls(self) -> dict[str, str]:
        return {engine.name: engine.url for engine in self.ready()}

    def states(self) -> dict[str, str]:
        """Of every engine that the run has had, by name."""
        return {engine.name: str(engine.state) for engine in self._pool.in_state(*EngineState)}

    def faults(self) -> dict[str, str]:
        """What is wrong with each engine that has failed and is not replaced, by name."""
        return self._pool.faults()

    def suspend(self) -> None:
        """Check no engine until `serve`; see `HealthMonitor.suspend`."""
        self._monitor.suspend()

    def serve(self, deadline: Deadline) -> None:
        """Send requests to all ready engines and no others, and look after them.

        Raises:
            EnginesFailedError: the router does not reach some of them.
        """
        self.dispatcher.serve(self.ready(), deadline)
        self._monitor.resume()

    def quarantine(self, names: Iterable[str], why: str) -> None:
        """See `UpdatableGeneration`."""
        for engine in self._pool.find(names):
            if self._pool.leave_state(engine, EngineState.READY, EngineState.QUARANTINED, why):
                logger.warning("%s is quarantined: %s", engine.name, why)
            self.dispatcher.withdraw(engine)

    def replace_failed(self, deadline: Deadline) -> list[str]:
        """See `UpdatableGeneration`."""
        self._monitor.suspend()
        failed = self._pool.in_state(EngineState.QUARANTINED, EngineState.DEAD)
        limit = self._tolerance.max_replacements
        if self._num_replaced + len(failed) > limit:
            raise ReplacementsUsedUpError(
                f"{_MAX_REPLACEMENTS}: {limit}, of which {self._num_replaced} are used; failed now: "
                f"{EnginesFailedError(self.faults())}"
            )
        self._num_replaced += len(failed)
        self._end(failed, deadline)
        names = self._start([engine.place for engine in failed], deadline)
        for old, new in zip(failed, names, strict=True):
            logger.info("%s (%s) is replaced by %s", old.name, old.fault, new)
        return names

    def add(self, deadline: Deadline) -> str:
        """See `SGLangGeneration.add_engine`."""
        self._monitor.suspend()
        if self.dispatcher.router is None:
            self._start_router()
            self.dispatcher.serve(self.ready(), deadline)
        if not self._pool.free_places():
            slots, left_s = [self._layout.engine_share], deadline.require("add an engine")
            self._pool.add_places(RayVirtualCluster(name="engine", slots=slots, device=self._device, timeout_s=left_s))
        (name,) = self._start(self._pool.free_places()[:1], deadline)
        return name

    def remove(self, name: str, deadline: Deadline) -> None:
        """See `SGLangGeneration.remove_engine`."""
        (engine,) = self._pool.find([name])
        if self.ready() == [engine]:
            raise ValueError(f"engines: got {name!r} to remove; it is the only one that is ready")
        self._monitor.suspend()
        self._end([engine], deadline)
        logger.info("%s is removed", name)

    def _end(self, engines: list[Engine], deadline: Deadline) -> None:
        for engine in engines:
            self.dispatcher.withdraw(engine)
            self._pool.end(engine, "removed")
        self._pool.clear(engines, deadline)

    def _start(self, places: Iterable[Place], deadline: Deadline) -> list[str]:
        started = self._pool.start(places)
        self._pool.wait_ready(started, deadline.require("start engines"))
        return [engine.name for engine in started]

    def shutdown(self) -> None:
        """End everything. Idempotent."""
        self._monitor.stop()
        self._pool.shutdown()
        if self.dispatcher.router is not None:
            self.dispatcher.router.stop()
