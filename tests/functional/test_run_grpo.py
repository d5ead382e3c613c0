"""The real command: what it writes, how it ends, what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.config.loader import load_config

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples/configs/grpo_tiny_cpu.yaml"
NUM_STEPS = 3
STEP_METRICS = {
    "train/reward_mean", "train/loss", "train/grad_norm", "train/kl", "train/token_mult_prob_error",
    "gen/mean_length", "gen/truncated_fraction", "time/generate_s", "time/train_s", "time/refit_s",
    "refit/bytes", "refit/buckets", "refit/tensors", "refit/weight_version",
}  # fmt: skip


def command(log_dir: Path, *overrides: str) -> list[str]:
    script = str(ROOT / "examples/run_grpo.py")
    return [sys.executable, script, "--config", str(TINY), f"logger.log_dir={log_dir}", *overrides]


def descendants_of(mark: str) -> list[psutil.Process]:
    """Every process that carries the run's marker in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("NRL_TEST_RUN") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def assert_all_gone(mark: str, within_s: float) -> None:
    end_s = time.monotonic() + within_s
    while (left := descendants_of(mark)) and time.monotonic() < end_s:
        time.sleep(0.5)
    assert [" ".join(process.cmdline())[:120] for process in left] == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    log_dir = tmp_path_factory.mktemp("run")
    done = subprocess.run(
        command(
            log_dir, "loss_fn.reference_policy_kl_penalty=0.01", "policy.optimizer.kwargs.lr=1e-3", "refit.verify=full"
        ),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "NRL_TEST_RUN": "finished"},
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


def test_every_refit_was_proven_by_the_exported_folder(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    log = (finished[0] / "engines/sglang_engine_0.log").read_text()
    assert log.count("Update engine weights online from disk") >= NUM_STEPS + 1
    assert not (finished[0] / "refit_export").exists()
    rows = [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]
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
    assert_all_gone("finished", within_s=20)


def test_sigterm_ends_everything(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, "grpo.max_num_steps=100000", "grpo.val_period=0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "NRL_TEST_RUN": "sigterm"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[:1] == ["1"]:
            break
    assert len(descendants_of("sigterm")) > 4
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert_all_gone("sigterm", within_s=20)


def test_no_engine_outlives_a_driver_that_is_killed_while_it_starts(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "NRL_TEST_RUN": "killed"},
    )
    end_s = time.monotonic() + 120
    while not engines_of("killed") and time.monotonic() < end_s:
        time.sleep(0.2)
    assert len(engines_of("killed")) >= 1
    process.kill()
    process.wait()
    end_s = time.monotonic() + 20
    while engines_of("killed") and time.monotonic() < end_s:
        time.sleep(0.5)
    assert engines_of("killed") == []


def engines_of(mark: str) -> list[str]:
    lines = [" ".join(process.cmdline()) for process in descendants_of(mark) if process.is_running()]
    return [line for line in lines if "sglang" in line.lower()]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["data.num_train=3", "grpo.num_prompts_per_step=4"], "data.num_train: got 3; must be at least"),
        (["policy.model_name=/no/such/folder"], "policy.model_name"),
        (["policy.tokenizer.chat_template='{{ nothing }}'"], "policy.tokenizer.chat_template"),
        (["cluster.device=cuda"], "cluster.device: got 'cuda'"),
        (["checkpointing.checkpoint_dir=/proc/model"], "checkpointing.checkpoint_dir: got '/proc/model'"),
        (["policy.generation.stop_token_ids=[100]"], "policy.generation.stop_token_ids: got 100; allowed: 0 to 99"),
        (
            ["data.dataset_name=ResponseDataset", "data.train_data_path=/no/file", "data.val_data_path=/no/file"],
            "data.val_data_path",
        ),
    ],
)
def test_bad_input_ends_with_2_and_one_line_before_a_run_folder_exists(
    tmp_path: Path, overrides: list[str], line: str
) -> None:
    log_dir = tmp_path / "logs"
    done = subprocess.run(command(log_dir, *overrides), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    assert done.stderr.splitlines()[-1].startswith(line)
    assert not log_dir.exists()
