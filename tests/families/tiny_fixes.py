"""What the rules of `shrink_config` do not know: per model type, attributes that a tiny model needs as stated here."""

from typing import Any

from transformers import (
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    Gemma4VisionConfig,
    Granite4VisionTextConfig,
    RadioConfig,
)

NOT_BUILDABLE: dict[str, str] = {}
"""Reasons by architecture; with transformers 5.19 none is needed."""

CHANGED_BY_LOADING = {
    "Kosmos2ForConditionalGeneration": ("text_model.model.embed_tokens.weight",),
    "ZayaForCausalLM": ("model.layers.*.mlp.gate.balancing_biases",),
}
"""Checkpoint names whose values `from_pretrained` overwrites, by its initialisation: the row of padding, a buffer."""

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
IMAGE_VOCABULARY = {"<image>": 5, "<|extra_200|>": 6, "IMGIMGAAZ": 7, "<|visual token 000000|>": 8}
QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [1],
    "ple_embed_dim": 32,
    "heads_per_ngram": 2,
    "eos_token_id": 2,
}
"""Sparse attention, and the n-gram embedding that is stored in shards."""
SHARED_KEYS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    "intermediate_size": [48] * 4,
}
"""The last two layers reuse keys and values of the first two."""
FASTVIT = {
    "architecture": "fastvit_mci3",
    "global_pool": "avg",
    "hidden_size": 32,
    "model_args": {"inference_mode": True, "layers": [1, 1, 1, 1, 1], "embed_dims": [16, 16, 16, 32, 32]},
}
PERCEPTION_ENCODER = {
    "architecture": "vit_pe_core_large_patch14_336",
    "model_args": {"embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": [28, 28], "global_pool": ""},
}

FIXES: dict[str, dict[str, Any]] = {
    # What the default config lacks.
    "chameleon": {"vocabulary_map": IMAGE_VOCABULARY},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}},
    "deepseek_ocr2_text": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma": {"vision_config": Gemma4VisionConfig()},
    "diffusion_gemma_text": {
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "global_head_dim": 16,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_hidden_layers": 2, "first_k_dense_replace": 1},
    "electra": {"embedding_size": 16},
    "emu3": {"vocabulary_map": IMAGE_VOCABULARY},
    "ernie4_5_vl_moe_text": {"rope_parameters": ROPE, "moe_intermediate_size": [24, 16]},
    "fast_vlm": {"vision_config": FASTVIT},
    "gemma4_assistant": {"text_config": Gemma4TextConfig(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0)},
    "gemma4_unified_assistant": {"text_config": Gemma4UnifiedTextConfig()},
    "granite4_vision": {
        "text_config": Granite4VisionTextConfig(),
        "deepstack_layer_map": [[0, 0]],
        "downsample_rate": "1/2",
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "nemotron_h_omni": {"vision_config": RadioConfig()},
    "perception_lm": {"vision_config": PERCEPTION_ENCODER},
    "qwen4_exp_text": QWEN4,
    "radio": {"video_temporal_patch_size": 2},
    "reformer": {"is_decoder": True, "axial_pos_shape": (8, 8), "axial_pos_embds_dim": (16, 16)},
    # What depends on other attributes, or is no attribute.
    "deepseek_v2": {"first_k_dense_replace": 1},
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [32, 32]},
    "falcon_h1": {"mamba_n_heads": 4},
    "gemma3n_text": SHARED_KEYS,
    "gemma3n_vision": {"model_args": {"channel_multiplier": 0.02}},
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "janus_vqgan": {"channel_multiplier": [1, 2], "num_res_blocks": 1},
    "mamba2": {"num_heads": 8},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
}
"""Final values of attributes by model type; a config stands for its shrunk self."""
