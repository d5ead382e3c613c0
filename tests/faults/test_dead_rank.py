"""The real command, one of whose trainer ranks is killed: one line says so, and nothing is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
NUM_STEPS_SEEN = 2
LIMIT_S = 300.0


def ranks_of(driver: int) -> list[psutil.Process]:
    """The trainers' actors, which Ray names after their class."""
    family = psutil.Process(driver).children(recursive=True)
    return [process for process in family if "DTensorPolicyWorkerV2" in " ".join(process.cmdline())]


def wait_for_steps(metrics: Path, process: subprocess.Popen[str]) -> None:
    limit_s = time.monotonic() + LIMIT_S
    while not metrics.exists() or len(metrics.read_text().splitlines()) < NUM_STEPS_SEEN:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit_s
        time.sleep(0.2)


def test_a_killed_rank_ends_the_run_with_one_line(tmp_path: Path) -> None:
    config = str(ROOT / "examples/configs/grpo_tiny_cpu.yaml")
    keys = [f"logger.log_dir={tmp_path}", "grpo.max_num_steps=100000", "grpo.val_period=0", "grpo.val_at_start=false"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples/run_grpo.py"), "--config", config, *keys],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_steps(tmp_path / "exp_001/metrics.jsonl", process)
        family = psutil.Process(process.pid).children(recursive=True)
        ranks = ranks_of(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[1].pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "Traceback" not in errors
    (line,) = [line for line in errors.splitlines() if "the run has ended" in line]
    assert line.startswith("run_grpo.py: the run has ended: policy: rank ")
    assert "all ranks ended: its process has ended (killed, or out of memory)" in line
    _, left = psutil.wait_procs(family, timeout=20)
    assert [" ".join(process.cmdline())[:100] for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
