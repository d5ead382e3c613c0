"""Tiny models, batches, a loss, and the 2-rank runs that the tests of this folder share."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from nemo_rl.config.schema import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.checkpoint import read_headers
from nemo_rl.models.policy.export import dtensor_params_generator
from nemo_rl.models.policy.export_plan import ExportPlan, make_export_plan
from nemo_rl.models.policy.interfaces import LossNormalizer
from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2

NUM_STEPS = 3
GLOBAL_BATCH = 8
TEMPERATURE = 0.7
# An epsilon well above float32 noise: with 1e-8 Adam turns the sign of a gradient of 1e-9 into a whole step.
ADAMW = {"lr": 1e-3, "weight_decay": 0.01, "betas": [0.9, 0.95], "eps": 1e-6}
WARM_UP = {"start_factor": 0.5, "end_factor": 1.0, "total_iters": 2}
MAX_GRAD_NORM = 0.05
"""Below the norms that the cases have, so that clipping acts."""


class WeightedLoss:
    """-sum(weight * log-prob) / num_tokens over response tokens."""

    def __call__(
        self, logprobs: torch.Tensor, data: BatchedDataDict, normalizer: LossNormalizer
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        loss = -(logprobs * mask * data["weights"][:, None]).sum() / max(normalizer.num_tokens, 1)
        return loss, {"mean_logprob": (logprobs.detach() * mask).sum() / max(normalizer.num_tokens, 1)}


def dense_config(tied: bool) -> PretrainedConfig:
    return Qwen3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=130,
        tie_word_embeddings=tied,
        attention_dropout=0.3,
        initializer_range=0.1,
    )


def moe_config() -> PretrainedConfig:
    return Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        num_experts=4,
        num_experts_per_tok=2,
    )


def glm_moe_config() -> PretrainedConfig:
    """One dense and one MoE layer; the router has a float32 bias of 8 values, which is a buffer."""
    return Glm4MoeConfig(
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        n_routed_experts=8,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
    )


def write_model(
    folder: Path, config: PretrainedConfig, values: Mapping[str, torch.Tensor] | None = None, seed: int = 1
) -> str:
    """Write a random model; `values` replace single tensors."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, value in (values or {}).items():
        model.state_dict()[name].copy_(value)
    model.save_pretrained(folder)
    return str(folder)


def make_batch(seed: int, num_samples: int = GLOBAL_BATCH, vocab: int = 130) -> BatchedDataDict:
    """Prompts of 3 to 6 and responses of 1 to 7 tokens; the fourth sample is masked out."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(3, 7, (num_samples,), generator=generator)
    lengths = prompt + torch.randint(1, 8, (num_samples,), generator=generator)
    columns = torch.arange(int(lengths.max()) + 2)
    real = columns < lengths[:, None]
    ids = torch.randint(1, vocab, real.shape, generator=generator) * real
    sample_mask = torch.ones(num_samples)
    sample_mask[3] = 0.0
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=lengths,
        token_mask=(real & (columns >= prompt[:, None])).float(),
        sample_mask=sample_mask,
        weights=torch.randn(num_samples, generator=generator),
    )


def policy_config(
    *, precision: str = "float32", micro_batch: int = 2, checkpointing: bool = False, tensor_parallel: int = 1
) -> PolicyConfig:
    return PolicyConfig.model_validate(
        {
            "model_name": "tiny",
            "precision": precision,
            "train_global_batch_size": GLOBAL_BATCH,
            "train_micro_batch_size": micro_batch,
            "max_total_sequence_length": 32,
            "max_grad_norm": MAX_GRAD_NORM,
            "optimizer": {"kwargs": ADAMW},
            "scheduler": {"kwargs": WARM_UP},
            "dtensor_cfg": {"activation_checkpointing": checkpointing, "tensor_parallel_size": tensor_parallel},
            "generation": {"max_new_tokens": 8, "temperature": TEMPERATURE},
        }
    )


def make_worker(folder: str, cfg: PolicyConfig, *, rank: int, world_size: int, port: int) -> DTensorPolicyWorkerV2:
    return DTensorPolicyWorkerV2(
        cfg=cfg,
        loss_needs_reference=True,
        log_file=os.devnull,
        model_folder=folder,
        tokenizer_folder=None,
        device="cpu",
        rank=rank,
        world_size=world_size,
        master_addr="127.0.0.1",
        master_port=port,
        timeout_s=60.0,
        seed=0,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Case:
    """One training run on every rank, each with a group of its own."""

    name: str
    folder: str
    port: int
    precision: str = "float32"
    micro_batch: int = 2
    checkpointing: bool = False


def train_case(case: Case, rank: int, world_size: int) -> dict[str, Any]:
    """Three steps; returns what this rank saw, and the weights in float32."""
    torch.set_num_threads(1)
    cfg = policy_config(precision=case.precision, micro_batch=case.micro_batch, checkpointing=case.checkpointing)
    worker = make_worker(case.folder, cfg, rank=rank, world_size=world_size, port=case.port)
    parts = [make_batch(seed).shard_by_batch_size(world_size)[rank] for seed in range(NUM_STEPS)]
    before = worker.get_logprobs(parts[0])["logprobs"]
    results = [worker.train(part, WeightedLoss()) for part in parts]
    model = worker.model
    seen = {
        "before": before,
        "reference": worker.get_reference_policy_logprobs(parts[0])["reference_logprobs"],
        "after": worker.get_logprobs(parts[0])["logprobs"],
        "results": results,
        "weights": {name: tensor.clone() for name, tensor in dtensor_params_generator(model, exact_plan(worker, case))},
        "is_tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        "inv_freq": model.get_buffer("model.rotary_emb.inv_freq").clone(),
        "raw_names": [name for name, _ in model.named_modules()],
        "is_bad_step_refused": bad_step_is_refused(worker, parts[0], rank),
    }
    worker.export_hf(f"{case.folder}-{case.name}-{world_size}-export")
    worker.shutdown()
    return seen


def exact_plan(worker: DTensorPolicyWorkerV2, case: Case) -> ExportPlan:
    """Everything in float32, whatever the precision of the case."""
    return make_export_plan(worker.export_plan.twin, read_headers(Path(case.folder)), torch.float32)


def bad_step_is_refused(worker: DTensorPolicyWorkerV2, part: BatchedDataDict, rank: int) -> bool:
    """A nan on rank 0 alone must stop every rank before its weights change."""
    bad = BatchedDataDict(part)
    if rank == 0:
        bad["weights"] = part["weights"] * float("nan")
    before = [shard.detach().to_local().clone() for shard in worker.model.parameters()]
    try:
        worker.train(bad, WeightedLoss())
    except FloatingPointError:
        after = [shard.detach().to_local() for shard in worker.model.parameters()]
        return all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    return False


def load_error(folder: str, rank: int, world_size: int, port: int) -> str:
    """What a rank raises when rank 0 cannot read the checkpoint."""
    try:
        make_worker(folder, policy_config(), rank=rank, world_size=world_size, port=port)
    except ValueError as error:
        return str(error)
    return ""


def rank_main(rank: int, world_size: int, cases: list[Case], broken: Case, out_dir: str) -> None:
    """Entry point of a spawned rank: every case, then the checkpoint that cannot be read."""
    seen: dict[str, Any] = {case.name: train_case(case, rank, world_size) for case in cases}
    seen[broken.name] = load_error(broken.folder, rank, world_size, broken.port)
    torch.save(seen, f"{out_dir}/rank{rank}.pt")
