"""The configuration of engines in functional tests."""

from pathlib import Path
from typing import Any

from nemo_rl.config.schema import PolicyConfig
from nemo_rl.models.generation.sglang.http_client import EngineError
from nemo_rl.models.generation.sglang.sampler import Endpoint

HOST = "127.0.0.1"
CONCURRENCY = 8
MAX_TOTAL_SEQUENCE_LENGTH = 512


class OneEngine:
    """A `Dispatcher` that knows engine 0 alone and sends nothing again."""

    num_engines = 1

    def __init__(self, url: str) -> None:
        self._endpoint = Endpoint(f"engine 0 at {url}", url)

    def choose(self, index: int, attempt: int) -> Endpoint:
        return self._endpoint

    def report(self, endpoint: Endpoint, attempt: int, error: EngineError) -> None:
        raise error


def make_policy_config(
    model_folder: Path,
    *,
    server: dict[str, Any] | None = None,
    tolerance: dict[str, Any] | None = None,
    **generation: Any,
) -> PolicyConfig:
    """Float32 policy on `model_folder`; `server`, `tolerance` and `generation` override single keys."""
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
                    },
                    "sglang_fault_tolerance_config": tolerance or {},
                },
                **generation,
            },
        }
    )
