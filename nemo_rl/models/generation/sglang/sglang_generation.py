"""The driver's handle on all engines: starts them, samples from them, leads them through a refit, replaces them."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from nemo_rl.config.layout import Layout
from nemo_rl.config.schema import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.models.generation.interfaces import EnginesFailedError, EnginesLostError, UpdatableGeneration
from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.engine_calls import gather_answers
from nemo_rl.models.generation.sglang.engine_control import EngineControl
from nemo_rl.models.generation.sglang.engine_pool import Engine
from nemo_rl.models.generation.sglang.fleet import EngineFleet
from nemo_rl.models.generation.sglang.http_client import EngineError
from nemo_rl.models.generation.sglang.receiver import HttpReceiver
from nemo_rl.models.generation.sglang.sampler import EngineSampler, SampleBatch
from nemo_rl.models.generation.sglang.sglang_worker import SGLangGenerationWorker
from nemo_rl.utils.threads import on_thread

T = TypeVar("T")


class SGLangGeneration(UpdatableGeneration):
    """Made without engines, so that a refused combination costs nothing; `launch` starts them."""

    def __init__(
        self,
        *,
        cfg: PolicyConfig,
        layout: Layout,
        device: str,
        worker_class: type[SGLangGenerationWorker] = SGLangGenerationWorker,
    ) -> None:
        self.cfg = cfg
        self._server_cfg = cfg.generation.sglang_cfg.sglang_server_config
        self._num_slots_per_engine = layout.num_slots_per_engine
        self.keys = AccessKeys.make()
        """Of this run's engines and router."""
        self._fleet = EngineFleet(cfg=cfg, layout=layout, device=device, keys=self.keys, worker_class=worker_class)
        self._sampler: EngineSampler | None = None
        self._unfinished: SampleBatch | None = None
        self._in_group: set[int] = set()

    def launch(
        self,
        cluster: RayVirtualCluster,
        *,
        model_folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        log_folder: Path,
        image_token_id: int | None = None,
    ) -> None:
        """Start one actor and one server per bundle; returns at once. `image_token_id`: of a model that gets pictures."""
        self._fleet.launch(cluster, model_folder=model_folder, log_folder=log_folder)
        self._sampler = EngineSampler(
            cfg=self.cfg,
            dispatcher=self._fleet.dispatcher,
            keys=self.keys,
            pad_token_id=int(tokenizer.pad_token_id),
            eos_token_ids=[int(tokenizer.eos_token_id)],
            image_token_id=image_token_id,
        )

    def wait_ready(self) -> None:
        """See `EngineFleet.wait_ready`."""
        self._fleet.wait_ready()

    def generate(self, data: BatchedDataDict, *, greedy: bool = False) -> BatchedDataDict:
        """See `GenerationInterface` and `EngineSampler.finish`."""
        if self._sampler is None:
            raise AssertionError("generation: launch it and wait for it before use")
        self._unfinished = self._sampler.prepare(data, greedy=greedy)
        return self.resume_generate()

    def resume_generate(self) -> BatchedDataDict:
        """See `UpdatableGeneration`."""
        if self._sampler is None or self._unfinished is None:
            raise AssertionError("generation: nothing was left unfinished")
        try:
            samples = self._sampler.finish(self._unfinished)
        except EngineError as error:
            raise self._fleet.dispatcher.name_engine(error) from error
        self._unfinished = None
        return samples

    @property
    def engines(self) -> dict[str, str]:
        """`starting`, `ready`, `quarantined`, `dead` or `ended`: the state of each engine there has been, by name."""
        return self._fleet.states()

    @property
    def rollout_engines(self) -> list[HttpReceiver]:
        """See `UpdatableGeneration`."""
        return [engine.receiver for engine in self._fleet.ready() if engine.receiver is not None]

    @property
    def engine_gpu_counts(self) -> list[int]:
        """See `UpdatableGeneration`."""
        return [self._num_slots_per_engine] * len(self._fleet.ready())

    @property
    def refit_timeout_s(self) -> float:
        return self._server_cfg.refit_timeout_s

    @property
    def num_new_engines(self) -> int:
        """See `UpdatableGeneration`."""
        return len({engine.id for engine in self._fleet.ready()} ^ self._in_group)

    def clear_updatable_num_new_engines(self) -> None:
        self._in_group = {engine.id for engine in self._fleet.ready()}

    @property
    def replaces_failed_engines(self) -> bool:
        return self.cfg.generation.sglang_cfg.sglang_fault_tolerance_config.use_fault_tolerance

    @property
    def failed_engines(self) -> Mapping[str, str]:
        """See `UpdatableGeneration`."""
        return self._fleet.faults()

    def quarantine(self, names: Iterable[str], why: str = "a refit failed") -> None:
        """See `UpdatableGeneration`."""
        self._fleet.quarantine(names, why)

    def replace_failed(self, deadline: Deadline) -> list[str]:
        """See `UpdatableGeneration`."""
        return self._fleet.replace_failed(deadline)

    def add_engine(self, deadline: Deadline) -> str:
        """Start one more engine, between refits; returns its name. It gets requests after its first refit.

        It takes the place of one that was removed, or else reserves slots in the Ray cluster.

        Raises:
            EnginesFailedError: it did not start.
            TimeoutError: the cluster has no free slots.
        """
        return self._fleet.add(deadline)

    def remove_engine(self, name: str, deadline: Deadline) -> None:
        """End an engine, between refits, and free its place.

        Raises:
            ValueError: there is no such engine, or no other one that is ready.
        """
        self._fleet.remove(name, deadline)

    def pause(self, deadline: Deadline) -> None:
        """See `UpdatableGeneration`."""
        self._fleet.suspend()
        mode = self._server_cfg.pause_generation_mode
        self._on_all("pause", lambda control, left_s: control.pause_and_flush(mode, left_s), deadline)

    def begin_weight_update(self, deadline: Deadline) -> None:
        self._on_all("begin_weight_update", lambda control, left_s: control.begin_weight_update(left_s), deadline)

    def end_weight_update(self, deadline: Deadline) -> None:
        self._on_all("end_weight_update", lambda control, left_s: control.end_weight_update(left_s), deadline)

    def free_memory_bytes(self, deadline: Deadline) -> int:
        return min(self._answers("free_memory_bytes", _ask_free_memory_bytes, deadline))

    def weight_checksums(self, deadline: Deadline) -> list[dict[str, str]]:
        return self._on_all("weight_checksums", lambda control, left_s: control.checksums(left_s), deadline)

    def set_weight_version(self, version: int, deadline: Deadline) -> None:
        self._on_all(
            "set_weight_version",
            lambda control, left_s: control.update_weight_version(str(version), left_s),
            deadline,
        )

    def update_weights_from_disk(self, folder: str, deadline: Deadline) -> None:
        self._on_all(
            "update_weights_from_disk",
            lambda control, left_s: control.update_weights_from_disk(folder, left_s),
            deadline,
        )

    def resume(self, deadline: Deadline) -> None:
        """See `UpdatableGeneration`."""
        self._on_all("resume", lambda control, left_s: control.continue_generation(left_s), deadline)
        self._fleet.serve(deadline)

    def _on_all(self, what: str, call: Callable[[EngineControl, float], T], deadline: Deadline) -> list[T]:
        """Call every ready engine at once; the answers in their order."""

        def start(engine: Engine, left_s: float) -> Future[T]:
            control = engine.control
            return on_thread(f"{what} {engine.name}", lambda: call(control, left_s))

        return self._answers(what, start, deadline)

    def _answers(self, what: str, start: Callable[[Engine, float], Future[T]], deadline: Deadline) -> list[T]:
        engines, left_s = self._fleet.ready(), deadline.require(what)
        if not engines:
            raise EnginesLostError(self._fleet.faults())
        calls = {engine.name: start(engine, left_s) for engine in engines}
        answers, faults = gather_answers(calls, left_s + 1.0)
        if faults:
            raise EnginesFailedError(faults)
        return [answers[engine.name] for engine in engines]

    def shutdown(self) -> None:
        self._fleet.shutdown()


def _ask_free_memory_bytes(engine: Engine, _: float) -> Future[int]:
    """On its node."""
    answer: Future[int] = engine.actor.free_memory_bytes.remote().future()
    return answer
