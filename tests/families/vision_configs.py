"""Configurations of tiny vision-language models: 2 text layers, 2 vision blocks."""

from typing import Any

from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    LlamaConfig,
    LlavaConfig,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)
from vision_processors import (
    FIXED_IMAGE_SIZE,
    FIXED_PATCH_SIZE,
    GEMMA3_TOKENS_PER_IMAGE,
    QWEN2_PATCH_SIZE,
    VOCAB_SIZE,
    special_token_id,
)

from nemo_rl.models.tiny_vision_model import (
    QWEN_MERGE_SIZE,
    make_tiny_qwen3_vl_config,
    qwen3_text,
    qwen3_vision,
    qwen_token_ids,
    tiny_text,
)

_VISION_HIDDEN_SIZE = 32
# On a CPU the engine makes it a multiple of 64 and then finds the checkpoint too small.
_WIDE_VISION_SIZE = 128
_HEAD_DIM = 16
NUM_EXPERTS = 4
_TEXT = tiny_text(VOCAB_SIZE)
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_QWEN_VISION: dict[str, Any] = {"depth": 2, "num_heads": 2, "spatial_merge_size": QWEN_MERGE_SIZE}
_FIXED_VISION: dict[str, Any] = {
    "hidden_size": _VISION_HIDDEN_SIZE,
    "intermediate_size": _WIDE_VISION_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": FIXED_IMAGE_SIZE,
    "patch_size": FIXED_PATCH_SIZE,
}


def make_qwen2_vl() -> Qwen2VLConfig:
    vision = {
        **_QWEN_VISION,
        "embed_dim": _VISION_HIDDEN_SIZE,
        "hidden_size": _TEXT["hidden_size"],
        "mlp_ratio": 2,
        "patch_size": QWEN2_PATCH_SIZE,
        # The engine reads the hub's name of `in_channels`.
        "in_chans": 3,
    }
    return Qwen2VLConfig(
        text_config={**_TEXT, "rope_parameters": dict(_MROPE)}, vision_config=vision, **qwen_token_ids()
    )


def make_qwen2_5_vl() -> Qwen2_5_VLConfig:
    vision = {
        **_QWEN_VISION,
        "hidden_size": _VISION_HIDDEN_SIZE,
        "intermediate_size": 48,
        "out_hidden_size": _TEXT["hidden_size"],
        "patch_size": QWEN2_PATCH_SIZE,
        "window_size": 4 * QWEN2_PATCH_SIZE,
        "fullatt_block_indexes": [1],
    }
    return Qwen2_5_VLConfig(
        text_config={**_TEXT, "rope_parameters": dict(_MROPE)}, vision_config=vision, **qwen_token_ids()
    )


def make_qwen3_vl(*, tied: bool) -> Qwen3VLConfig:
    return make_tiny_qwen3_vl_config(vocab_size=VOCAB_SIZE, tied=tied)


def make_qwen3_vl_moe() -> Qwen3VLMoeConfig:
    experts = {
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "tie_word_embeddings": False,
    }
    return Qwen3VLMoeConfig(
        text_config={**qwen3_text(VOCAB_SIZE), **experts},
        vision_config={**qwen3_vision(), "deepstack_visual_indexes": [0, 1]},
        **qwen_token_ids(),
    )


def _qwen3_5_text() -> dict[str, Any]:
    """One layer of either kind; a quarter of each head turns with the position."""
    return {
        **_TEXT,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "layer_types": ["linear_attention", "full_attention"],
        # The engine reads the hub's name of the same.
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }


def _qwen3_5_vision() -> dict[str, Any]:
    # As in the hub's config.json. Without it the engine makes mergers that no checkpoint has.
    return {**qwen3_vision(), "deepstack_visual_indexes": []}


def make_qwen3_5() -> Qwen3_5Config:
    return Qwen3_5Config(text_config=_qwen3_5_text(), vision_config=_qwen3_5_vision(), **qwen_token_ids())


def make_qwen3_5_moe() -> Qwen3_5MoeConfig:
    text = _qwen3_5_text()
    del text["intermediate_size"]
    experts = {
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
    }
    return Qwen3_5MoeConfig(text_config={**text, **experts}, vision_config=_qwen3_5_vision(), **qwen_token_ids())


def make_gemma3() -> Gemma3Config:
    text = {
        **_TEXT,
        "head_dim": _HEAD_DIM,
        "query_pre_attn_scalar": _HEAD_DIM,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    return Gemma3Config(
        text_config=text,
        vision_config={**_FIXED_VISION, "vision_use_head": False},
        mm_tokens_per_image=GEMMA3_TOKENS_PER_IMAGE,
        boi_token_index=special_token_id("<start_of_image>"),
        eoi_token_index=special_token_id("<end_of_image>"),
        image_token_index=special_token_id("<image_soft_token>"),
        tie_word_embeddings=True,
    )


def make_llava() -> LlavaConfig:
    return LlavaConfig(
        text_config=LlamaConfig(**_TEXT),
        vision_config=CLIPVisionConfig(**_FIXED_VISION, projection_dim=_VISION_HIDDEN_SIZE),
        image_token_index=special_token_id("<image>"),
        image_seq_length=(FIXED_IMAGE_SIZE // FIXED_PATCH_SIZE) ** 2,
    )
