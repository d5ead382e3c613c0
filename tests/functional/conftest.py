"""What functional tests share: a tiny model folder, and one real SGLang server for the whole session."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.schema import PolicyConfig
from nemo_rl.models.generation.sglang.sampler import EngineSampler
from nemo_rl.models.generation.sglang.sglang_worker import SGLangGenerationWorker
from nemo_rl.models.tiny_model import write_tiny_random_qwen3

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


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two layers with a character tokenizer, float32."""
    folder = tmp_path_factory.mktemp("tiny_qwen3")
    write_tiny_random_qwen3(folder)
    return folder


@pytest.fixture(scope="session")
def shared_engine(
    tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SGLangGenerationWorker]:
    """One real server on `tiny_model_folder`. A test leaves it as it found it: weights, version, not paused."""
    worker = SGLangGenerationWorker(
        cfg=make_policy_config(tiny_model_folder),
        engine_index=0,
        model_folder=str(tiny_model_folder),
        tokenizer_folder=None,
        device="cpu",
        log_dir=str(tmp_path_factory.mktemp("engine_log")),
        host=HOST,
    )
    try:
        worker.start()
        yield worker
    finally:
        worker.shutdown()


@pytest.fixture
def make_generation(shared_engine: SGLangGenerationWorker, tiny_model_folder: Path) -> Callable[..., EngineSampler]:
    """Makes the driver's handle on the shared server, with settings of `policy.generation`."""

    def make(*, server: dict[str, Any] | None = None, **generation: Any) -> EngineSampler:
        config = make_policy_config(tiny_model_folder, server=server, **generation)
        return EngineSampler(cfg=config, urls=[shared_engine.url()], pad_token_id=0, eos_token_ids=[2])

    return make
