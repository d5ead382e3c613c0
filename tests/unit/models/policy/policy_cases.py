"""Tiny models, batches, a loss and a worker, shared by the tests of this folder and of `tests/parity`."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from nemo_rl.config.schema import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
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


def plain_loss(model: torch.nn.Module, batch: BatchedDataDict) -> torch.Tensor:
    """`WeightedLoss` of a whole batch, by a model that is not sharded."""
    ids, lengths = batch["input_ids"], batch["input_lengths"]
    attention_mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    logits = model(input_ids=ids, attention_mask=attention_mask).logits.float() / TEMPERATURE
    chosen = torch.log_softmax(logits[:, :-1], -1).gather(2, ids[:, 1:, None]).squeeze(2)
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    return -(chosen * batch["weights"][:, None] * mask).sum() / mask.sum()


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


def llama_config(tied: bool) -> PretrainedConfig:
    """Biases where a row-parallel product must add them once; grouped heads; the pad token in the second half of the
    vocabulary and in the batches, where its row of the embedding gets no gradient.
    """
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=130,
        tie_word_embeddings=tied,
        attention_bias=True,
        mlp_bias=True,
        pad_token_id=70,
        initializer_range=0.1,
    )


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
    *, precision: str = "float32", micro_batch: int = 2, dtensor: Mapping[str, Any] | None = None
) -> PolicyConfig:
    """`dtensor`: settings of `policy.dtensor_cfg`."""
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
            "dtensor_cfg": dict(dtensor or {}),
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
