"""The shapes of a policy that are compared with a plain model, as data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from policy_cases import dense_config, glm_moe_config, llama_config, moe_config
from transformers import PretrainedConfig


@dataclass(frozen=True)
class ModelFamily:
    make_config: Callable[[], PretrainedConfig]
    vocab_size: int


@dataclass(frozen=True)
class Shape:
    name: str
    num_ranks: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of `policy.dtensor_cfg`."""
    family: str = "Qwen3"
    """Key of FAMILIES."""
    micro_batch: int = 2
    precision: str = "float32"

    @property
    def num_data_ranks(self) -> int:
        """Parts into which a batch is cut."""
        return self.num_ranks // int(self.settings.get("tensor_parallel_size", 1))


def moe(**changes: Any) -> PretrainedConfig:
    """Gradients large enough for the clipping to act."""
    config = moe_config()
    config.update({"initializer_range": 0.1, **changes})
    return config


def glm_moe_with_norms() -> PretrainedConfig:
    """Heads that two ranks can share."""
    config = glm_moe_config()
    config.update({"initializer_range": 0.1, "use_qk_norm": True, "num_key_value_heads": 2})
    return config


FAMILIES = {
    "Qwen3": ModelFamily(lambda: dense_config(tied=True), 130),
    "Qwen3, untied": ModelFamily(lambda: dense_config(tied=False), 130),
    "Llama": ModelFamily(lambda: llama_config(tied=True), 130),
    "Llama, untied": ModelFamily(lambda: llama_config(tied=False), 130),
    "Qwen3-MoE": ModelFamily(moe, 64),
    # FSDP2 shards five unevenly.
    "Qwen3-MoE, five experts": ModelFamily(
        lambda: moe(num_experts=5, num_attention_heads=4, num_key_value_heads=2), 64
    ),
    "GLM-4-MoE, norms of heads": ModelFamily(glm_moe_with_norms, 64),
    "Qwen3-MoE, aux": ModelFamily(
        lambda: moe(output_router_logits=True, router_aux_loss_coef=0.3, num_key_value_heads=2), 64
    ),
}

CHECKPOINTING, COMPILE = {"activation_checkpointing": True}, {"torch_compile": True}
PAIRS = {"tensor_parallel_size": 2}

SHAPES = (
    Shape("one rank", num_ranks=1),
    Shape("FSDP2 x2"),
    Shape("FSDP2 x2, untied head", family="Qwen3, untied", micro_batch=3),
    Shape("activation checkpointing x2", settings=CHECKPOINTING, micro_batch=4),
    Shape("torch.compile x2", settings=COMPILE),
    Shape("activation checkpointing, torch.compile x2", settings=CHECKPOINTING | COMPILE),
    Shape("mixture of experts x2", family="Qwen3-MoE"),
    Shape("mixture of experts, auxiliary loss, one micro-batch", 1, family="Qwen3-MoE, aux", micro_batch=8),
    Shape("mixture of experts, auxiliary loss x2", family="Qwen3-MoE, aux"),
    Shape(
        "mixture of experts, auxiliary loss, activation checkpointing x2",
        settings=CHECKPOINTING,
        family="Qwen3-MoE, aux",
    ),
    Shape("TP 2", settings=PAIRS, family="Llama"),
    Shape("TP 2, untied head", settings=PAIRS, family="Llama, untied"),
    Shape("TP 2, norms of heads", settings=PAIRS),
    Shape("TP 2, norms of heads that the plan leaves out", settings=PAIRS, family="GLM-4-MoE, norms of heads"),
    Shape("TP 2, mixture of experts, auxiliary loss", settings=PAIRS, family="Qwen3-MoE, aux", micro_batch=8),
    Shape("TP 2, mixture of experts", settings=PAIRS, family="Qwen3-MoE, five experts"),
    Shape("FSDP2 x2, TP 2, activation checkpointing", 4, settings=PAIRS | CHECKPOINTING, family="Llama"),
    Shape("FSDP2 x2, TP 2, mixture of experts", 4, settings=PAIRS, family="Qwen3-MoE, five experts"),
)
"""Rows of the table: float32, tight tolerance."""
