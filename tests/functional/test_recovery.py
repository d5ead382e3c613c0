"""Real trainers and a real engine that is killed: the run goes on, with the right weights."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from nemo_rl.algorithms.grpo import Participants, sample
from nemo_rl.config.loader import load_config
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.setup import prepare_inputs, start_participants
from nemo_rl.utils.metrics import MetricsLogger
from nemo_rl.utils.run_folder import make_run_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Participants]:
    """One engine and two ranks that survive its death; the first refit is done."""
    config = load_config(
        ROOT / "examples/configs/grpo_tiny_cpu.yaml",
        [
            f"logger.log_dir={tmp_path_factory.mktemp('recovery')}",
            "policy.generation.sglang_cfg.sglang_fault_tolerance_config.use_fault_tolerance=true",
            "policy.generation.sglang_cfg.sglang_server_config.refit_timeout_s=60",
            "policy.max_total_sequence_length=512",
            "policy.generation.max_new_tokens=400",
        ],
    )
    folder = make_run_folder(config.logger.log_dir)
    with (
        MetricsLogger(folder.path, num_steps=1, tensorboard=False) as metrics,
        start_participants(config, prepare_inputs(config), folder, metrics) as participants,
    ):
        participants.synchronizer.init_communicator()
        participants.synchronizer.sync_weights()
        yield participants


def kill_server(run: Participants) -> str:
    """SIGKILL everything of the engine's server; returns the engine's name."""
    (engine,) = run.generation.rollout_engines
    supervisor = psutil.Process(ray.get(engine.actor.pid.remote()))
    for process in supervisor.children(recursive=True):
        os.kill(process.pid, signal.SIGKILL)
    return str(engine.name)


def digests_of_export(run: Participants, folder: Path) -> dict[str, str]:
    run.policy.export_hf(str(folder))
    run.generation.update_weights_from_disk(str(folder), Deadline(60))
    (digests,) = run.generation.weight_checksums(Deadline(60))
    return digests


def test_a_refit_replaces_an_engine_that_died_and_sends_everything_again(run: Participants, tmp_path: Path) -> None:
    old = kill_server(run)
    version = run.synchronizer.version
    run.synchronizer.mark_stale()
    run.synchronizer.sync_weights()
    assert run.synchronizer.version == version + 1
    assert not run.synchronizer.is_stale
    assert run.synchronizer.metrics()["refit/recoveries"] >= 1
    (engine,) = run.generation.rollout_engines
    assert engine.name != old
    (sent,) = run.generation.weight_checksums(Deadline(60))
    assert sent == digests_of_export(run, tmp_path / "export")


def test_the_last_engine_lost_costs_no_sample(run: Participants) -> None:
    prompts = run.train_prompts.next_batch().repeat_interleave(2)
    version = run.synchronizer.version
    old = kill_server(run)
    rollout = sample(run, prompts)
    assert len(rollout.responses) == prompts.size
    assert set(rollout.weight_versions) == {str(version)}
    assert run.generation.rollout_engines[0].name != old
    assert run.synchronizer.version == version
