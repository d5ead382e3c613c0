"""The driver's handle on all engines: starts them, samples from them, leads them through a refit."""

import logging
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from transformers import PreTrainedTokenizerBase

from nemo_rl.config.layout import Layout
from nemo_rl.config.schema import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.models.generation.interfaces import UpdatableGeneration
from nemo_rl.models.generation.sglang.http_client import EngineError
from nemo_rl.models.generation.sglang.receiver import RayReceiver
from nemo_rl.models.generation.sglang.sampler import EngineSampler
from nemo_rl.models.generation.sglang.sglang_worker import SGLangGenerationWorker

logger = logging.getLogger(__name__)

_SHUTDOWN_TIMEOUT_S = 60.0
_ACTOR_START_S = 120.0
"""For the actor's process and its imports, before its server starts."""
_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Ray would kill the server's supervisor, which is what ends the server's own children when the actor is gone."""
_NUM_ACTOR_THREADS = 8
"""Control calls run beside a long one: a bucket that loads, a group that forms."""


class SGLangGeneration(UpdatableGeneration):
    """Made without engines, so that a refused combination costs nothing; `launch` starts them."""

    def __init__(self, *, cfg: PolicyConfig, layout: Layout, device: str) -> None:
        self.cfg = cfg
        self._server_cfg = cfg.generation.sglang_cfg.sglang_server_config
        self._layout = layout
        self._device = device
        self._actors: list[Any] = []
        self._starts: list[Any] = []
        self._receivers: list[RayReceiver] = []
        self._sampler: EngineSampler | None = None
        self._tokens: tuple[int, list[int]] = (0, [])
        self._num_new_engines = 0

    def launch(
        self, cluster: RayVirtualCluster, *, model_folder: Path, tokenizer: PreTrainedTokenizerBase, log_folder: Path
    ) -> None:
        """Start one actor and one server per bundle; returns at once."""
        self._tokens = (int(tokenizer.pad_token_id), [int(tokenizer.eos_token_id)])
        actor_class: Any = ray.remote(SGLangGenerationWorker)
        for index in range(self._layout.num_engines):
            options = cluster.actor_options(index, _ENVIRONMENT) | {"max_concurrency": _NUM_ACTOR_THREADS}
            actor = actor_class.options(**options).remote(
                cfg=self.cfg,
                engine_index=index,
                model_folder=str(model_folder),
                tokenizer_folder=self.cfg.tokenizer.name,
                device=self._device,
                log_dir=str(log_folder),
                # On several nodes each actor finds its own: this is the driver's.
                host="127.0.0.1" if self._layout.num_nodes == 1 else None,
            )
            self._actors.append(actor)
            self._starts.append(actor.start.remote())

    def wait_ready(self) -> None:
        """Return when every server answers.

        Raises:
            ServerStartError: with the end of that server's log.
        """
        urls = _get(self._starts, self._server_cfg.startup_timeout_s + _ACTOR_START_S)
        offers = _get([actor.capabilities.remote() for actor in self._actors], _ACTOR_START_S)
        self._receivers = [
            RayReceiver(name=f"engine {index} at {url}", actor=actor, takes_flattened=offer.flattened_bucket)
            for index, (actor, url, offer) in enumerate(zip(self._actors, urls, offers, strict=True))
        ]
        pad_token_id, eos_token_ids = self._tokens
        self._sampler = EngineSampler(cfg=self.cfg, urls=urls, pad_token_id=pad_token_id, eos_token_ids=eos_token_ids)
        self._num_new_engines = len(urls)

    def generate(self, data: BatchedDataDict, *, greedy: bool = False) -> BatchedDataDict:
        """See `GenerationInterface` and `EngineSampler.generate`."""
        if self._sampler is None:
            raise AssertionError("generation: launch it and wait for it before use")
        return self._sampler.generate(data, greedy=greedy)

    @property
    def rollout_engines(self) -> list[RayReceiver]:
        return list(self._receivers)

    @property
    def engine_gpu_counts(self) -> list[int]:
        return [self._layout.num_slots_per_engine] * len(self._receivers)

    @property
    def refit_timeout_s(self) -> float:
        return self._server_cfg.refit_timeout_s

    @property
    def num_new_engines(self) -> int:
        return self._num_new_engines

    def clear_updatable_num_new_engines(self) -> None:
        self._num_new_engines = 0

    def pause(self, deadline: Deadline) -> None:
        self._on_all("pause_generation", deadline, mode=self._server_cfg.pause_generation_mode)
        self._on_all("invalidate_kv_cache", deadline)

    def begin_weight_update(self, deadline: Deadline) -> None:
        self._on_all("begin_weight_update", deadline)

    def end_weight_update(self, deadline: Deadline) -> None:
        self._on_all("end_weight_update", deadline)

    def weight_checksums(self, deadline: Deadline) -> list[dict[str, str]]:
        return self._on_all("check_weights", deadline, action="checksum")

    def set_weight_version(self, version: int, deadline: Deadline) -> None:
        self._on_all("update_weight_version", deadline, version=str(version))

    def update_weights_from_disk(self, folder: str, deadline: Deadline) -> None:
        self._on_all("update_weights_from_disk", deadline, folder=folder)

    def resume(self, deadline: Deadline) -> None:
        self._on_all("continue_generation", deadline)

    def _on_all(self, method: str, deadline: Deadline, **arguments: Any) -> list[Any]:
        """Call every engine at once; raises EngineError of the first that fails."""
        left_s = deadline.require(method)
        calls = [getattr(actor, method).remote(**arguments, timeout_s=left_s) for actor in self._actors]
        return _get(calls, left_s + 1.0)

    def shutdown(self) -> None:
        actors, self._actors = self._actors, []
        self._receivers, self._sampler = [], None
        if actors:
            ray.wait(
                [actor.shutdown.remote() for actor in actors], num_returns=len(actors), timeout=_SHUTDOWN_TIMEOUT_S
            )
        for actor in actors:
            ray.kill(actor)


def _get(references: list[Any], timeout_s: float) -> list[Any]:
    """The results; raises what the actor raised, without Ray's wrapping."""
    try:
        return ray.get(references, timeout=timeout_s)
    except RayTaskError as error:
        raise error.cause from error
    except RayActorError as error:
        raise EngineError("an engine", "actor", None, f"its process has ended: {error}") from error
