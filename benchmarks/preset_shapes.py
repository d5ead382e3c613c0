"""Shapes of the benchmark's models, by preset; without torch, so that the command line is read at once."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    architecture: str
    """Class name in transformers."""
    config: dict[str, Any]
    """What differs from the defaults of the architecture's config class."""


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool, vocab: int = 151_936) -> Preset:
    config = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": min(heads, 8),
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": tied,
    }
    return Preset("Qwen3ForCausalLM", config)


def _qwen3_moe(layers: int, experts: int, active: int) -> Preset:
    """Narrow experts, 64 KiB per matrix: the cost of a refit then lies in the number of tensors."""
    config = {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "num_experts": experts,
        "num_experts_per_tok": active,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    return Preset("Qwen3MoeForCausalLM", config)


_SMOLLM2_135M = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "tie_word_embeddings": True,
}

PRESETS: dict[str, Preset] = {
    "135m": Preset("LlamaForCausalLM", _SMOLLM2_135M),
    "0.6b": _qwen3(1024, 3072, layers=28, heads=16, tied=True),
    # On the hub it is tied; here the head travels, too.
    "4b": _qwen3(2560, 9728, layers=36, heads=32, tied=False),
    "8b": _qwen3(4096, 12_288, layers=36, heads=32, tied=False),
    "moe5k": _qwen3_moe(layers=48, experts=32, active=4),
    "tiny": _qwen3(128, 256, layers=2, heads=2, tied=False, vocab=512),
    "tiny-moe": _qwen3_moe(layers=2, experts=4, active=2),
}
