"""What a refit does to an engine on a GPU, by the engine's own checksums; and after its death."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from gpu_stack import SMALL_BATCH, checksums, checksums_of, make_prompts, send, started, train_once

from nemo_rl.algorithms.grpo import Participants
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.model_source import resolve_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Participants]:
    """The default model, with an engine that is replaced when it dies."""
    with started(
        tmp_path_factory.mktemp("gpu_refit"),
        "policy.generation.sglang_cfg.sglang_fault_tolerance_config.use_fault_tolerance=true",
        *SMALL_BATCH,
        "policy.refit_buffer_size_gb=0.05",
    ) as run:
        yield run


def test_log_probs_of_trainer_and_gpu_engine_agree(gpu_run: Participants) -> None:
    out = gpu_run.generation.generate(make_prompts(8))
    data = BatchedDataDict(input_ids=out["output_ids"], input_lengths=out["unpadded_sequence_lengths"])
    own = gpu_run.policy.get_logprobs(data)["logprobs"]
    mask = out["logprobs"] != 0
    assert mask.sum() > 50
    assert (own - out["logprobs"])[mask].abs().mean() < 0.1


def test_weights_go_to_the_gpu_engine_and_back_bit_by_bit(gpu_run: Participants, tmp_path: Path) -> None:
    first = checksums(gpu_run)
    train_once(gpu_run)
    gpu_run.synchronizer.sync_weights()
    assert gpu_run.synchronizer.metrics()["refit/buckets"] > 4
    sent = checksums(gpu_run)
    assert sent.keys() == first.keys()
    assert sum(sent[name] != first[name] for name in first) > len(first) / 2
    gpu_run.policy.export_hf(str(tmp_path / "w1"))
    assert checksums_of(gpu_run, tmp_path / "w1") == sent
    assert send(gpu_run, resolve_model("smollm2-135m-instruct")) == first
    assert send(gpu_run, tmp_path / "w1") == sent


def test_a_gpu_engine_that_dies_is_replaced_and_gets_everything(gpu_run: Participants) -> None:
    before = checksums(gpu_run)
    (engine,) = gpu_run.generation._fleet.ready()
    supervisor = psutil.Process(ray.get(engine.actor.pid.remote()))
    for process in supervisor.children(recursive=True):
        os.kill(process.pid, signal.SIGKILL)
    version = gpu_run.synchronizer.version
    gpu_run.synchronizer.sync_weights()
    assert gpu_run.synchronizer.version == version + 1
    assert gpu_run.synchronizer.metrics()["refit/recoveries"] >= 1
    assert gpu_run.generation.rollout_engines[0].name != engine.name
    assert checksums(gpu_run) == before
