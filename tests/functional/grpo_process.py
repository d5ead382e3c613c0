"""The real command as a process: start it, wait for a step, find everything that belongs to it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import psutil

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples/configs/grpo_tiny_cpu.yaml"
MARK = "NRL_TEST_RUN"
GONE_WITHIN_S = 20.0
ENDLESS = (
    "grpo.max_num_steps=100000", "grpo.val_period=0", "grpo.val_at_start=false", "logger.tensorboard_enabled=false",
    "loss_fn.reference_policy_kl_penalty=0",
)  # fmt: skip


def command(log_dir: Path, *overrides: str) -> list[str]:
    script = str(ROOT / "examples/run_grpo.py")
    return [sys.executable, script, "--config", str(TINY), f"logger.log_dir={log_dir}", *overrides]


class GrpoProcess:
    """A run without end, in a session of its own; leaving it kills its driver. `mark` tells its processes from others."""

    def __init__(self, mark: str, log_dir: Path, environment: Mapping[str, str]) -> None:
        self.mark = mark
        self._not_ours = set(psutil.Process().children(recursive=True))
        self._family: set[psutil.Process] = set()
        self._ports: set[int] = set()
        self._log = log_dir / f"{mark}.err"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command(log_dir / mark, *ENDLESS),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **environment, MARK: mark},
                start_new_session=True,
                # A test run in the background of a shell ignores Ctrl-C, and so would its children.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def wait_for_step(self, step: int) -> None:
        """Return in the midst of the next one."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.split()[:1] == [str(step)]:
                return
        raise AssertionError(f"{self.mark} ended with {self.process.wait()}: {self.errors()[-3000:]}")

    def errors(self) -> str:
        """What it wrote to standard error."""
        return self._log.read_text()

    def look(self) -> set[psutil.Process]:
        """Note and return all processes of the run: also workers of a Ray cluster that this process has started."""
        self._family |= set(psutil.Process().children(recursive=True)) - self._not_ours
        self._ports |= {c.laddr.port for process in self._family for c in listening(process)}
        return self._family

    def named(self, text: str) -> list[psutil.Process]:
        return [process for process in self._family if text in name_of(process)]

    def assert_gone(self, ended_s: float) -> None:
        """Nothing of the run is left `GONE_WITHIN_S` after `ended_s` of the monotonic clock."""
        while (left := self._left()) and time.monotonic() < ended_s + GONE_WITHIN_S:
            time.sleep(0.5)
        assert [f"{process.pid} {name_of(process)[:120]}" for process in left] == [], self.mark
        # A port in use has an owner that can be seen, unless nothing runs that owns it.
        held = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid is None]
        assert {c.laddr.port for c in held} & self._ports == set(), self.mark

    def _left(self) -> list[psutil.Process]:
        running = [process for process in {*self._family, *marked(self.mark)} if is_running(process)]
        # A cluster that the run has joined keeps idle workers for the next.
        return [p for p in running if not (name_of(p).startswith("ray::IDLE") and parent_of(p) in self._not_ours)]


def marked(mark: str) -> list[psutil.Process]:
    """Every process that has the mark in its environment, whoever its parent is now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and is_running(process):
                found.append(process)
        except psutil.Error:
            continue
    return found


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def parent_of(process: psutil.Process) -> psutil.Process | None:
    try:
        return process.parent()
    except psutil.NoSuchProcess:
        return None


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def listening(process: psutil.Process) -> list[psutil._ntuples.pconn]:
    try:
        return [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []
