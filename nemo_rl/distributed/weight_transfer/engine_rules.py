"""What SGLang's loaders expect of a stream beyond the checkpoint's names. Data; the first refit's proof checks it."""

import re

FLOAT32_TENSORS = re.compile(
    r"(?:^|\.)(?:e_score_correction_bias|expert_bias|router_bias|balancing_biases|A_log|attn_sink|learnable_sink_param)$"
)
"""Held in float32 by the engine whatever the precision of the rest: they travel exact also out of a checkpoint that has
them in another dtype, or all of itself in float32. Where an engine does not, it rounds as the trainer would.
"""

CONSTANT_TENSORS = re.compile(r"(?:^|\.)(?:axis_map|position_ids|normalizer|embed_scale)$")
"""Buffers that the engine makes of its config: no checkpoint holds them."""

JOINED_TENSORS = (
    # Multi-head latent attention (DeepSeek and its kin; Dots3 joins a gate, too).
    re.compile(r"(.*\.)(?:q_a_proj|kv_a_proj_with_mqa|g_proj)\."),
    # DeepSeek-V4: the compressor, and attention.
    re.compile(r"(.*\.compressor\.)(?:wkv|wgate)\."),
    re.compile(r"(.*\.)(?:wq_a|wkv)\."),
    # Vision towers of MiniMax-VL.
    re.compile(r"(.*vision_model\.encoder\.layers\.\d+\.self_attn\.)[qkv]_proj\."),
)
"""One matrix on the engine, whose parts it joins only when they come in one call; a part that comes alone is dropped
without a word. Tensors with an equal first group of the first pattern that matches belong together.
"""
