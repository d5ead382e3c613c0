"""What functional tests share: a tiny model folder, and one real SGLang server for the whole session."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_config import HOST, OneEngine, make_policy_config

from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.engine_control import EngineControl
from nemo_rl.models.generation.sglang.sampler import EngineSampler
from nemo_rl.models.generation.sglang.sglang_worker import SGLangGenerationWorker
from nemo_rl.models.tiny_model import write_tiny_random_qwen3


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two layers with a character tokenizer, float32."""
    folder = tmp_path_factory.mktemp("tiny_qwen3")
    write_tiny_random_qwen3(folder)
    return folder


@pytest.fixture(scope="session")
def engine_keys() -> AccessKeys:
    """Of the shared server."""
    return AccessKeys.make()


@pytest.fixture(scope="session")
def engine_log_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the shared server writes its log, `sglang_engine_0.log`."""
    return tmp_path_factory.mktemp("engine_log")


@pytest.fixture(scope="session")
def shared_worker(
    tiny_model_folder: Path, engine_keys: AccessKeys, engine_log_folder: Path
) -> Iterator[SGLangGenerationWorker]:
    """Of the shared server, which `shared_engine` starts."""
    worker = SGLangGenerationWorker(
        cfg=make_policy_config(tiny_model_folder),
        engine_index=0,
        model_folder=str(tiny_model_folder),
        tokenizer_folder=None,
        device="cpu",
        log_dir=str(engine_log_folder),
        host=HOST,
        keys=engine_keys,
    )
    yield worker
    worker.shutdown()


@pytest.fixture(scope="session")
def shared_engine(shared_worker: SGLangGenerationWorker, engine_keys: AccessKeys) -> EngineControl:
    """One real server on `tiny_model_folder`. A test leaves it as it found it: weights, version, not paused."""
    return EngineControl("engine 0", shared_worker.start(), 60.0, engine_keys)


@pytest.fixture
def make_generation(
    shared_engine: EngineControl, tiny_model_folder: Path, engine_keys: AccessKeys
) -> Callable[..., EngineSampler]:
    """Makes the driver's handle on the shared server, with settings of `policy.generation`."""

    def make(*, server: dict[str, Any] | None = None, **generation: Any) -> EngineSampler:
        config = make_policy_config(tiny_model_folder, server=server, **generation)
        dispatcher = OneEngine(shared_engine.url)
        return EngineSampler(cfg=config, dispatcher=dispatcher, keys=engine_keys, pad_token_id=0, eos_token_ids=[2])

    return make
