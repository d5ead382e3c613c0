"""The configuration of engines in functional tests."""

from pathlib import Path
from typing import Any

from nemo_rl.config.schema import PolicyConfig

HOST = "127.0.0.1"
CONCURRENCY = 8
MAX_TOTAL_SEQUENCE_LENGTH = 512


def make_policy_config(model_folder: Path, *, server: dict[str, Any] | None = None, **generation: Any) -> PolicyConfig:
    """Float32 policy on `model_folder`; `server` and `generation` override single keys."""
    return PolicyConfig.model_validate(
        {
            "model_name": str(model_folder),
            "precision": "float32",
            "train_global_batch_size": 1,
            "train_micro_batch_size": 1,
            "max_total_sequence_length": MAX_TOTAL_SEQUENCE_LENGTH,
            "generation": {
                "max_new_tokens": 24,
                "sglang_cfg": {
                    "sglang_server_config": {
                        "sglang_server_concurrency": CONCURRENCY,
                        "startup_timeout_s": 300.0,
                        "request_timeout_s": 120.0,
                        **(server or {}),
                    }
                },
                **generation,
            },
        }
    )
