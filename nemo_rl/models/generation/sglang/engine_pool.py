"""The engines of a run: which there are, where they stand, in what state they are."""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import ray

from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.preflight import shared_environment
from nemo_rl.models.generation.interfaces import EnginesFailedError
from nemo_rl.models.generation.sglang.actor_end import own_process_id, wait_for_end
from nemo_rl.models.generation.sglang.engine_calls import gather_answers
from nemo_rl.models.generation.sglang.engine_control import EngineControl
from nemo_rl.models.generation.sglang.http_client import ServerCapabilities
from nemo_rl.models.generation.sglang.receiver import HttpReceiver
from nemo_rl.utils.threads import on_thread

_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Ray would kill the server's supervisor, which is what ends the server's own children when the actor is gone."""
_NUM_ACTOR_THREADS = 2
"""`shutdown` is heard while `start` waits for the server."""
_DESCRIBE_TIMEOUT_S = 120.0
_SHUTDOWN_TIMEOUT_S = 10.0
"""For engines to end in order; then their actors are killed, which ends the servers, too."""
_PROCESS_ID_TIMEOUT_S = 5.0
_END_TIMEOUT_S = 30.0
"""How long a supervisor may take to end its server once its actor is gone."""


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    QUARANTINED = "quarantined"
    """May hold a part of new weights: never resumed."""
    DEAD = "dead"
    """Its actor is killed, and its server ends by that."""
    ENDED = "ended"
    """Gone, and its place is free."""


@dataclass(frozen=True)
class Place:
    """One bundle of a cluster, for one engine at a time."""

    cluster: RayVirtualCluster
    bundle: int


@dataclass(eq=False)
class Engine:
    id: int
    """Never used again."""
    place: Place
    actor: Any
    started: Any
    """Ray's reference to the server's URL."""
    process: Any
    """Ray's reference to the process id of the actor, on its node."""
    state: EngineState = EngineState.STARTING
    fault: str = ""
    url: str = ""
    receiver: HttpReceiver | None = None
    """Of an engine that has served."""

    @property
    def name(self) -> str:
        return f"engine {self.id} at {self.url}" if self.url else f"engine {self.id}"

    @property
    def control(self) -> EngineControl:
        if self.receiver is None:
            raise AssertionError(f"{self.name} has not served")
        return self.receiver.control


class EnginePool:
    """Calls may come from the driver's main thread and from that of its health monitor."""

    def __init__(
        self, make_actor: Callable[[dict[str, Any], int], Any], make_control: Callable[[int, str], EngineControl]
    ) -> None:
        """Make an empty pool.

        Args:
            make_actor: given options of an actor and an engine's id, makes an `SGLangGenerationWorker`.
            make_control: of the engine with this id and URL.
        """
        self._make_actor = make_actor
        self._make_control = make_control
        self._engines: list[Engine] = []
        self._places: list[Place] = []
        self._lock = threading.RLock()

    def add_places(self, cluster: RayVirtualCluster) -> None:
        self._places += [Place(cluster, bundle) for bundle in range(cluster.num_bundles)]

    def free_places(self) -> list[Place]:
        taken = {engine.place for engine in self._engines if engine.state is not EngineState.ENDED}
        return [place for place in self._places if place not in taken]

    def in_state(self, *states: EngineState) -> list[Engine]:
        """In the order of their ids."""
        with self._lock:
            return [engine for engine in self._engines if engine.state in states]

    def faults(self) -> dict[str, str]:
        """What is wrong with each engine that has failed and is not replaced, by name."""
        return {engine.name: engine.fault for engine in self.in_state(EngineState.QUARANTINED, EngineState.DEAD)}

    def find(self, names: Iterable[str]) -> list[Engine]:
        """Raises ValueError when there has never been an engine of one of these names."""
        known = {engine.name: engine for engine in self._engines}
        if unknown := sorted(set(names) - known.keys()):
            raise ValueError(f"engines: got {', '.join(unknown)}; allowed: {', '.join(known)}")
        return [known[name] for name in names]

    def start(self, places: Iterable[Place]) -> list[Engine]:
        """Start one engine in each place; returns at once."""
        started = []
        for place in places:
            number = len(self._engines)
            environment = {**_ENVIRONMENT, **shared_environment(os.environ)}
            options = place.cluster.actor_options(place.bundle, environment) | {"max_concurrency": _NUM_ACTOR_THREADS}
            actor = self._make_actor(options, number)
            process, url = actor.__ray_call__.remote(own_process_id), actor.start.remote()
            started.append(Engine(number, place, actor, url, process))
            self._engines.append(started[-1])
        return started

    def wait_ready(self, engines: Sequence[Engine], timeout_s: float) -> None:
        """Return when all serve.

        Raises:
            EnginesFailedError: some did not start, with the end of their server's log. They are dead then.
        """
        urls, faults = gather_answers({engine.name: engine.started.future() for engine in engines}, timeout_s)
        served = [engine for engine in engines if engine.name in urls]
        controls = {engine.name: self._make_control(engine.id, urls[engine.name]) for engine in served}
        asked = {name: on_thread("capabilities", partial(_capabilities, control)) for name, control in controls.items()}
        offers, no_offers = gather_answers(asked, _DESCRIBE_TIMEOUT_S)
        values, no_values = gather_answers(
            {e.name: e.actor.nccl_cumem_enable.remote().future() for e in served}, _DESCRIBE_TIMEOUT_S
        )
        faults |= no_offers | no_values
        for engine in engines:
            if engine.name in faults:
                self.end(engine, faults[engine.name])
                continue
            name = engine.name
            engine.receiver = HttpReceiver(controls[name], offers[name].flattened_bucket, values[name])
            engine.url = urls[name]
            self.leave_state(engine, EngineState.STARTING, EngineState.READY)
        if faults:
            raise EnginesFailedError(faults)

    def leave_state(self, engine: Engine, old: EngineState, new: EngineState, fault: str = "") -> bool:
        """Whether the engine was in the old state and is in the new one now."""
        with self._lock:
            if engine.state is not old:
                return False
            engine.state, engine.fault = new, fault
            return True

    def end(self, engine: Engine, fault: str) -> bool:
        """Kill the actor; the supervisor ends the server then, and every request to it. False: it is ended already."""
        with self._lock:
            if engine.state in (EngineState.DEAD, EngineState.ENDED):
                return False
            engine.state, engine.fault = EngineState.DEAD, engine.fault or fault
        ray.kill(engine.actor)
        return True

    def clear(self, engines: Sequence[Engine], deadline: Deadline) -> None:
        """Wait until nothing of dead engines is left where they stood: no process, no port, no memory of a device.

        Raises:
            EnginesFailedError: something is left.
        """
        # An actor that has no process id yet has no server either.
        actors, _ = gather_answers({engine.name: engine.process.future() for engine in engines}, _PROCESS_ID_TIMEOUT_S)
        task: Any = ray.remote(wait_for_end)
        calls = {}
        for engine in engines:
            if engine.name in actors:
                options = engine.place.cluster.actor_options(engine.place.bundle, {})
                calls[engine.name] = task.options(**options).remote(actors[engine.name], _END_TIMEOUT_S).future()
        left, faults = gather_answers(calls, deadline.require("to end failed engines"))
        faults |= {name: f"processes {pids} do not end" for name, pids in left.items() if pids}
        if faults:
            raise EnginesFailedError(faults)
        for engine in engines:
            engine.state, engine.receiver = EngineState.ENDED, None

    def shutdown(self) -> None:
        """End every engine and wait for those that still listen to their actor. Idempotent."""
        listening = self.in_state(EngineState.STARTING, EngineState.READY)
        gather_answers({e.name: e.actor.shutdown.remote().future() for e in listening}, _SHUTDOWN_TIMEOUT_S)
        for engine in self.in_state(EngineState.STARTING, EngineState.READY, EngineState.QUARANTINED):
            self.end(engine, "shut down")


def _capabilities(control: EngineControl) -> ServerCapabilities:
    return control.capabilities
