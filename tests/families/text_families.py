"""Decoder families in tiny form; every one starts on the real engine on a CPU."""

from typing import Any

import torch
import transformers
from family import Family
from transformers import PretrainedConfig

_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": torch.bfloat16,
}
# Every layer has experts: SGLang ignores `mlp_only_layers`, as the hub's checkpoints leave it empty.
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Layer 0 is dense, layer 1 has experts.
_DENSE_THEN_MOE: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
# Settings that hub configs have, scaled to 2048 positions.
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_DEEPSEEK: dict[str, Any] = {
    **_DENSE_THEN_MOE,
    # In the hub's config.json and read by the engine; transformers knows no such key.
    "moe_layer_freq": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    # As on the hub; the engine's rope for this attention knows no other on a CPU.
    "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}
# `/health` generates a token, which ends a server that cannot.


def _make_config(config_class: str, **changes: Any) -> PretrainedConfig:
    """Build the transformers config of that name from the common sizes and what the family changes of them."""
    config: PretrainedConfig = getattr(transformers, config_class)(**{**_COMMON, **changes})
    return config


def _family(name: str, architecture: str, config_class: str, **changes: Any) -> Family:
    return Family(name, architecture, lambda: _make_config(config_class, **changes))


def _weights_only_family(
    name: str, architecture: str, config_class: str, *, server_args: tuple[str, ...] = (), **changes: Any
) -> Family:
    """A family whose forward pass needs Triton: the engine holds and compares weights, and never generates."""
    return Family(
        name,
        architecture,
        lambda: _make_config(config_class, **changes),
        server_args=server_args,
        generates=False,
    )


TEXT_FAMILIES: tuple[Family, ...] = (
    _family("Llama", "LlamaForCausalLM", "LlamaConfig"),
    _family("Llama, tied", "LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=True),
    _family("Mistral", "MistralForCausalLM", "MistralConfig", sliding_window=None),
    _family("Qwen2, tied", "Qwen2ForCausalLM", "Qwen2Config", tie_word_embeddings=True),
    _family("Qwen3", "Qwen3ForCausalLM", "Qwen3Config"),
    _family("Qwen3, tied", "Qwen3ForCausalLM", "Qwen3Config", tie_word_embeddings=True),
    _family("OLMo2", "Olmo2ForCausalLM", "Olmo2Config"),
    _family("Phi-3", "Phi3ForCausalLM", "Phi3Config"),
    _weights_only_family(
        "Gemma 2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        tie_word_embeddings=True,
        query_pre_attn_scalar=16,
        # The hub's config.json has it beside `hidden_activation`, and SGLang reads this one.
        hidden_act="gelu_pytorch_tanh",
    ),
    _family(
        "Gemma 3, text",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        tie_word_embeddings=True,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    _family("GLM-4", "Glm4ForCausalLM", "Glm4Config", attention_bias=True),
    _family(
        "GLM-4-MoE",
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        **_DENSE_THEN_MOE,
        use_qk_norm=True,
        attention_bias=True,
    ),
    _family(
        "OLMoE",
        "OlmoeForCausalLM",
        "OlmoeConfig",
        num_experts=4,
        num_experts_per_tok=2,
        # As on the hub: SGLang's k_norm is as wide as its q_norm.
        num_key_value_heads=4,
    ),
    _weights_only_family(
        "Qwen2-MoE",
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        **_MOE,
        shared_expert_intermediate_size=64,
    ),
    _family("Qwen3-MoE", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_MOE),
    _family("Mixtral", "MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    _weights_only_family(
        "DeepSeek-V2",
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        **_DEEPSEEK,
        topk_method="group_limited_greedy",
        scoring_func="softmax",
    ),
    _weights_only_family(
        "DeepSeek-V3",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        **_DEEPSEEK,
        # With this method, which transformers takes for granted, the engine holds e_score_correction_bias.
        topk_method="noaux_tc",
        scoring_func="sigmoid",
    ),
    _weights_only_family(
        "GPT-OSS",
        "GptOssForCausalLM",
        "GptOssConfig",
        server_args=("--attention-backend=triton",),
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=_YARN,
    ),
    _weights_only_family(
        "Qwen3-Next",
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        **_MOE,
        shared_expert_intermediate_size=32,
        # The hub's config.json has this one, transformers writes the next one only, and SGLang reads the first.
        full_attention_interval=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
)
