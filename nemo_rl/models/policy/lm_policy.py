"""The policy as the driver sees it: one worker per trainer rank."""

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.config.schema import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.weight_transfer.preflight import shared_environment
from nemo_rl.distributed.weight_transfer.receiver import Receiver
from nemo_rl.distributed.weight_transfer.sender import RefitStats
from nemo_rl.distributed.worker_group import RayWorkerGroup
from nemo_rl.models.model_source import loadable_name
from nemo_rl.models.policy.interfaces import LossFunction, PolicyInterface, TrainResult
from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2

_STEP_TIMEOUT_S = 3600.0
"""A training step, a forward pass, an export: beyond it a rank is taken for dead."""
_ANSWER_S = 3.5
"""Between the ranks' deadline and the end of ranks that did not answer: more than they wait for one another beyond it,
and less than the 5 s within which a refit must have failed."""

_LET_GO_S, _LET_GO_PART = 3.0, 0.1
"""Kept for rank 0 to let go of its engines after a failure at the limit; at most this part of the time."""


class Policy(PolicyInterface):
    """Made without ranks, so that a refused combination costs nothing; `launch` starts them."""

    def __init__(self, *, cfg: PolicyConfig, worker_class: type[DTensorPolicyWorkerV2] = DTensorPolicyWorkerV2):
        self.cfg = cfg
        self._worker_class = worker_class
        self._workers: RayWorkerGroup | None = None
        self._cluster: RayVirtualCluster | None = None
        self._group_name = ""
        self._model_folder = Path()

    def launch(
        self,
        cluster: RayVirtualCluster,
        *,
        model_folder: Path,
        device: str,
        needs_reference: bool,
        seed: int,
        log_folder: Path,
    ) -> None:
        """Start one worker per bundle; returns at once."""
        self._cluster, self._model_folder = cluster, model_folder
        address, port = cluster.reserve_rendezvous()
        self._workers = RayWorkerGroup(
            name="policy",
            worker_class=self._worker_class,
            cluster=cluster,
            env=trainer_environment(device, cluster.num_bundles),
            make_kwargs=lambda rank: {
                "cfg": self.cfg,
                "loss_needs_reference": needs_reference,
                "model_folder": str(model_folder),
                "tokenizer_folder": self.cfg.tokenizer.name or str(model_folder),
                "device": device,
                "rank": rank,
                "world_size": cluster.num_bundles,
                "master_addr": address,
                "master_port": port,
                "timeout_s": _STEP_TIMEOUT_S,
                "seed": seed,
                "log_file": str(log_folder / f"rank{rank}.log"),
            },
        )

    def wait_ready(self) -> None:
        """Return when every rank holds its shard."""
        self.workers.ready(timeout_s=_STEP_TIMEOUT_S)
        if self._cluster is not None:
            self._cluster.release_rendezvous()

    @property
    def workers(self) -> RayWorkerGroup:
        """The ranks."""
        if self._workers is None:
            raise AssertionError("policy: launch it before use")
        return self._workers

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        return self._forward("get_logprobs", data)

    def get_reference_policy_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        return self._forward("get_reference_policy_logprobs", data)

    def train(self, data: BatchedDataDict, loss_fn: LossFunction) -> TrainResult:
        batches = data.make_microbatch_iterator(self.cfg.train_global_batch_size)
        # The r-th data-parallel rank trains on the r-th part of every global batch.
        shards = zip(*(batch.shard_by_batch_size(self._num_shards) for batch in batches), strict=True)
        per_rank = self._repeated([(BatchedDataDict.from_batches(parts), loss_fn) for parts in shards])
        results: list[TrainResult] = self.workers.run("train", timeout_s=_STEP_TIMEOUT_S, per_rank=per_rank)
        return results[0]

    def export_hf(self, folder: str, *, timeout_s: float | None = None) -> None:
        limit_s = _STEP_TIMEOUT_S if timeout_s is None else timeout_s
        self.workers.run("export_hf", timeout_s=limit_s, folder=folder)

    def export_adapter(self, folder: str) -> None:
        # Here, where the config's relative paths begin, and not where Ray has put the ranks.
        base = loadable_name(self.cfg.model_name, self._model_folder)
        self.workers.run("export_adapter", timeout_s=_STEP_TIMEOUT_S, folder=folder, base=base)

    def free_memory_bytes(self) -> int:
        return min(self.workers.run("free_memory_bytes", timeout_s=self._answer_by_s(None)))

    def connect_sglang_rollout_engines_distributed(
        self,
        *,
        rollout_engines: Sequence[Receiver],
        engine_gpu_counts: list[int],
        group_name: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        # A name of its own each time: an engine refuses a name that it still holds, from whichever policy.
        self._group_name = group_name or f"nemo_rl_refit_{uuid.uuid4().hex[:8]}"
        self.workers.run(
            "connect_sglang_rollout_engines_distributed",
            timeout_s=self._answer_by_s(timeout_s),
            limit_s=_ranks_limit_s(timeout_s),
            rollout_engines=rollout_engines,
            engine_gpu_counts=engine_gpu_counts,
            group_name=self._group_name,
        )

    def prepare_weight_update(self, *, buffer_size_bytes: int, timeout_s: float | None = None) -> str:
        ticket = uuid.uuid4().hex
        self.workers.start(
            "prepare_weight_update",
            ticket=ticket,
            buffer_size_bytes=buffer_size_bytes,
            limit_s=_ranks_limit_s(timeout_s),
        )
        return ticket

    def update_weights_to_sglang_distributed(
        self,
        *,
        rollout_engines: Sequence[Receiver],
        buffer_size_bytes: int,
        rollout_engine_lock: Any = None,
        target_precision: str = "bf16",
        sglang_quantization_cfg: Mapping[str, Any] | None = None,
        negated: bool = False,
        ticket: str | None = None,
        timeout_s: float | None = None,
    ) -> RefitStats:
        stats: list[RefitStats] = self.workers.run(
            "update_weights_to_sglang_distributed",
            timeout_s=self._answer_by_s(timeout_s),
            limit_s=_ranks_limit_s(timeout_s),
            rollout_engines=rollout_engines,
            buffer_size_bytes=buffer_size_bytes,
            rollout_engine_lock=rollout_engine_lock,
            target_precision=target_precision,
            sglang_quantization_cfg=sglang_quantization_cfg,
            negated=negated,
            ticket=ticket,
        )
        return stats[0]

    def disconnect_sglang_rollout_engines_distributed(self, *, timeout_s: float | None = None) -> None:
        if self._workers is not None and self._workers.num_ranks:
            self._workers.run(
                "disconnect_sglang_rollout_engines_distributed",
                timeout_s=self._answer_by_s(timeout_s),
                limit_s=_ranks_limit_s(timeout_s),
            )

    def shutdown(self) -> None:
        if self._workers is not None:
            self._workers.shutdown()

    def _answer_by_s(self, timeout_s: float | None) -> float:
        """Beyond the ranks' own deadline, so that their error arrives, which says more than the driver's."""
        own_s = self.cfg.generation.sglang_cfg.sglang_server_config.refit_timeout_s
        return (own_s if timeout_s is None else timeout_s) + _ANSWER_S

    def _forward(self, method: str, data: BatchedDataDict) -> BatchedDataDict:
        per_rank = self._repeated([(shard,) for shard in data.shard_by_batch_size(self._num_shards)])
        results = self.workers.run(method, timeout_s=_STEP_TIMEOUT_S, per_rank=per_rank)
        return BatchedDataDict.from_batches(results[:: self.cfg.dtensor_cfg.tensor_parallel_size])

    @property
    def _num_shards(self) -> int:
        """Data-parallel ranks: each is the ranks that share matrices, which follow one another."""
        return self.workers.num_ranks // self.cfg.dtensor_cfg.tensor_parallel_size

    def _repeated(self, per_shard: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """The arguments of every rank."""
        return [arguments for arguments in per_shard for _ in range(self.cfg.dtensor_cfg.tensor_parallel_size)]


def _ranks_limit_s(timeout_s: float | None) -> float | None:
    """For the ranks: less than their caller has, so that a failure at the limit still ends in the ranks' own error."""
    return None if timeout_s is None else round(timeout_s - min(_LET_GO_S, _LET_GO_PART * timeout_s), 1)


def trainer_environment(device: str, num_ranks: int) -> dict[str, str]:
    """On CPU the ranks of a machine share its cores."""
    if device == "cuda":
        return shared_environment(os.environ)
    num_threads = max(1, (os.cpu_count() or 1) // num_ranks)
    return {**shared_environment(os.environ), "OMP_NUM_THREADS": str(num_threads), "CUDA_VISIBLE_DEVICES": ""}
