"""The real command on one GPU, with the default model: three steps; and steps with the shards in host memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_stack import CONFIG, ROOT, make_overrides

pytestmark = pytest.mark.gpu

NUM_STEPS = 3
NO_VALIDATION = ("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false")


def run_command(log_dir: Path, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of every step."""
    command = [sys.executable, str(ROOT / "examples/run_grpo.py"), "--config", str(CONFIG)]
    settings = make_overrides(
        log_dir, *NO_VALIDATION, "refit.verify=full", "loss_fn.reference_policy_kl_penalty=0.001", *overrides
    )
    done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    rows = [json.loads(line) for line in (log_dir / "exp_001/metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > 0]


def check_rows(rows: list[dict[str, Any]], num_steps: int) -> None:
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    for row in rows:
        assert row["refit/bytes"] == 2 * 134_515_008
        assert row["refit/tensors"] == 272
        assert row["refit/weight_version"] == row["step"] + 1
        assert 1.0 <= row["train/token_mult_prob_error"] < 1.2
        assert row["train/grad_norm"] > 0
        assert row["time/refit_verify_s"] > 0


def test_three_steps_of_the_default_model_on_one_gpu(tmp_path: Path) -> None:
    rows = run_command(tmp_path, f"grpo.max_num_steps={NUM_STEPS}")
    check_rows(rows, NUM_STEPS)
    assert rows[0]["train/kl"] == pytest.approx(0.0, abs=1e-3)
    assert (tmp_path / "exp_001/hf_model/model.safetensors").is_file()


def test_shards_in_host_memory_train_and_are_sent_whole(tmp_path: Path) -> None:
    rows = run_command(tmp_path, "grpo.max_num_steps=2", "policy.dtensor_cfg.cpu_offload=true")
    check_rows(rows, 2)
