"""A small policy configuration for the tests of generation."""

from typing import Any

from nemo_rl.config.schema import PolicyConfig


def make_config(
    *,
    server: dict[str, Any] | None = None,
    router: dict[str, Any] | None = None,
    tolerance: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    **policy: Any,
) -> PolicyConfig:
    raw: dict[str, Any] = {
        "model_name": "tiny-random-qwen3",
        "precision": "float32",
        "train_global_batch_size": 1,
        "train_micro_batch_size": 1,
        "max_total_sequence_length": 64,
        "generation": {
            "max_new_tokens": 16,
            "sglang_cfg": {
                "sglang_server_config": server or {},
                "sglang_router_config": router or {},
                "sglang_fault_tolerance_config": tolerance or {},
            },
            **(generation or {}),
        },
    }
    return PolicyConfig.model_validate({**raw, **policy})
