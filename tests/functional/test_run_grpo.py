"""The real command with two engines: what it writes, how it ends, what it leaves behind."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from grpo_process import GONE_WITHIN_S, MARK, command, marked, name_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.config.loader import load_config

NUM_STEPS = 3
STEP_METRICS = {
    "train/reward_mean", "train/loss", "train/grad_norm", "train/kl", "train/token_mult_prob_error",
    "gen/mean_length", "gen/truncated_fraction", "time/generate_s", "time/train_s", "time/refit_s",
    "refit/bytes", "refit/buckets", "refit/tensors", "refit/weight_version",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Two trainer ranks, and two engines behind the router."""
    log_dir = tmp_path_factory.mktemp("run")
    done = subprocess.run(
        command(
            log_dir,
            "loss_fn.reference_policy_kl_penalty=0.01",
            "policy.optimizer.kwargs.lr=1e-3",
            "refit.verify=full",
            "cluster.gpus_per_node=4",
            "policy.generation.colocated.resources.gpus_per_node=2",
        ),
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
        env={**os.environ, MARK: "finished"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return log_dir / "exp_001", done


def test_metrics_have_every_step_with_its_numbers(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    rows = [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["step"] for row in rows if "validation/accuracy" in row] == [0, 2, 3]
    for row in rows[1:]:
        assert row.keys() >= STEP_METRICS
        assert row["refit/weight_version"] == row["step"] + 1
        assert 1.0 <= row["train/token_mult_prob_error"] < 1.001  # float32 on both sides
        assert row["refit/tensors"] == 25
        assert row["refit/buckets"] == 1
        assert 0 < row["gen/mean_length"] <= 16
    assert len({row["refit/bytes"] for row in rows[1:]}) == 1
    assert rows[1]["train/kl"] == pytest.approx(0.0, abs=1e-6)


def test_every_refit_was_proven_on_both_engines(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = finished
    # Digests of each engine equal those of the other and of the folder that the trainer exports; both served samples, and
    # a sample of another version than that of the last refit would have ended the run.
    assert done.stderr.count("refit: all 38 engine checksums equal those of the exported folder") == NUM_STEPS + 1
    for log in (folder / "engines/sglang_engine_0.log", folder / "engines/sglang_engine_1.log"):
        assert log.read_text().count("Update engine weights online from disk") >= NUM_STEPS + 1
        assert log.read_text().count("Prefill batch") > NUM_STEPS
    assert not (folder / "refit_export").exists()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row["time/refit_verify_s"] > 0 for row in rows[1:])


def test_the_console_has_one_aligned_line_per_step(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    lines = finished[1].stdout.splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith(" step"))
    table = lines[heading : heading + NUM_STEPS + 2]
    assert {len(line) for line in table} == {len(table[0])}
    assert [line.split()[0] for line in table] == ["step", "0", "1", "2", "3"]


def test_the_run_folder_holds_what_a_person_looks_for(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, _ = finished
    assert load_config(folder / "config.yaml").policy.model_name == "tiny-random-qwen3"
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").iterdir())
    assert "server_args=" in (folder / "engines/sglang_engine_0.log").read_text()
    assert "rank 1 of 2" in (folder / "trainers/rank1.log").read_text()
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert samples[0].keys() == {"step", "prompt", "response", "reference", "reward"}


def test_the_exported_model_loads_with_its_tokenizer(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished[0] / "hf_model")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert AutoTokenizer.from_pretrained(finished[0] / "hf_model").decode([7, 8]) == '"#'


def test_nothing_is_left_of_a_finished_run(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    end_s = time.monotonic() + GONE_WITHIN_S
    while (left := marked("finished")) and time.monotonic() < end_s:
        time.sleep(0.5)
    assert list(map(name_of, left)) == []


def test_bad_input_ends_with_2_and_one_line_before_a_run_folder_exists(tmp_path: Path) -> None:
    log_dir = tmp_path / "logs"
    bad = command(log_dir, "policy.model_name=/no/such/folder")
    done = subprocess.run(bad, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    assert done.stderr.splitlines()[-1].startswith("policy.model_name: ")
    assert not log_dir.exists()
