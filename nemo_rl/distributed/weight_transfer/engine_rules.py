"""What SGLang's loaders expect of a stream beyond the checkpoint's names. Data; the first refit's proof checks it."""

import re

FLOAT32_TENSORS = re.compile(
    r"(?:^|\.)(?:e_score_correction_bias|expert_bias|router_bias|balancing_biases|A_log|attn_sink|learnable_sink_param)$"
)
"""Held in float32 by the engine whatever the precision of the rest: they travel exact also out of a checkpoint that has
them in another dtype, or all of itself in float32. Where an engine does not, it rounds as the trainer would.
"""

JOINED_TENSORS = (
    # Multi-head latent attention: one matrix on the engine, joined only when both come in one call.
    re.compile(r"(?:q_a_proj|kv_a_proj_with_mqa)\."),
)
"""Tensors with equal text before the match are loaded right only when one bucket holds them all."""
