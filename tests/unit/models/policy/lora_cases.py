"""LoRA runs on every rank: three training steps, ten refits to an engine, both exports."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import policy_cases as cases
import torch
from gloo_engine import GlooEngine
from torch.distributed.tensor import DTensor

from nemo_rl.models.policy.model_state import clean_name
from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2

NUM_REFITS = 10
BUCKET_BYTES = 20_000
LORA = {"enabled": True, "dim": 4, "alpha": 24}
SCALE = 6.0


@dataclass(frozen=True)
class LoraCase:
    name: str
    folder: str
    port: int
    precision: str
    lora: Mapping[str, Any]
    checkpointing: bool = False

    def export(self, world_size: int) -> str:
        return f"{self.folder}-{self.name}-{world_size}"


def run_case(case: LoraCase, rank: int, world_size: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    cfg = cases.policy_config(
        precision=case.precision,
        dtensor={"lora_cfg": case.lora, "activation_checkpointing": case.checkpointing},
    )
    worker = cases.make_worker(case.folder, cfg, rank=rank, world_size=world_size, port=case.port)
    parts = [cases.make_batch(seed).shard_by_batch_size(world_size)[rank] for seed in range(cases.NUM_STEPS)]
    seen: dict[str, Any] = {
        "has_copy": worker.reference is not None,
        "start": adapters(worker),
        "base": base_digest(worker),
        # First of all, before any gradient: the reference must not take the adapters' gradients away.
        "reference": worker.get_reference_policy_logprobs(parts[0])["reference_logprobs"],
        "before": worker.get_logprobs(parts[0])["logprobs"],
        "first_payload": Refits(worker, rank).next(),
        "results": [worker.train(part, cases.WeightedLoss()) for part in parts],
    }
    seen |= {
        "adapters": adapters(worker),
        "after": worker.get_logprobs(parts[0])["logprobs"],
        "reference_after": worker.get_reference_policy_logprobs(parts[0])["reference_logprobs"],
    }
    refits = Refits(worker, rank)
    seen["payloads"] = [refits.next()]
    state = worker._state
    worker.train(parts[0], cases.WeightedLoss())
    seen["payloads"] += [refits.next() for _ in range(NUM_REFITS - 1)]
    seen["is_state_kept"] = worker._state is state
    seen["last_adapters"] = adapters(worker)
    worker.export_hf(case.export(world_size))
    worker.export_adapter(f"{case.export(world_size)}_adapter", "tiny")
    seen["base_after"] = base_digest(worker)
    worker.disconnect_sglang_rollout_engines_distributed()
    worker.shutdown()
    return seen


class Refits:
    """A new group of the worker with one engine."""

    def __init__(self, worker: DTensorPolicyWorkerV2, rank: int) -> None:
        self._worker = worker
        self._engines = [GlooEngine("engine")] if rank == 0 else []
        self._precision = "bf16" if worker.dtype == torch.bfloat16 else "fp32"
        worker.connect_sglang_rollout_engines_distributed(
            rollout_engines=self._engines, engine_gpu_counts=[1], group_name="lora"
        )

    def next(self, ticket: str | None = None) -> dict[str, torch.Tensor]:
        """What one refit sends, on rank 0."""
        for engine in self._engines:
            engine.received.clear()
        self._worker.update_weights_to_sglang_distributed(
            rollout_engines=self._engines,
            buffer_size_bytes=BUCKET_BYTES,
            target_precision=self._precision,
            ticket=ticket,
        )
        return dict(self._engines[0].received) if self._engines else {}


def whole(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def adapters(worker: DTensorPolicyWorkerV2) -> dict[str, torch.Tensor]:
    parameters = worker.model.named_parameters()
    return {clean_name(name): whole(value) for name, value in parameters if ".lora_" in name}


def base_digest(worker: DTensorPolicyWorkerV2) -> str:
    """Of the bits of every parameter that is no adapter."""
    digest = hashlib.sha256()
    for name, value in worker.model.named_parameters():
        if ".lora_" not in name:
            digest.update(whole(value).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def rank_main(rank: int, world_size: int, lora_cases: list[LoraCase], out_dir: str) -> None:
    """Entry point of a spawned rank."""
    torch.save({case.name: run_case(case, rank, world_size) for case in lora_cases}, f"{out_dir}/rank{rank}.pt")
