"""However a run ends: soon after, no process, port or Ray actor of it is left, and the next run starts at once."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import ray
from grpo_process import GONE_WITHIN_S, GrpoProcess

CUMEM, ALLOCATOR = "NCCL_CUMEM_ENABLE", "PYTORCH_CUDA_ALLOC_CONF"
NUM_SLOTS = 3
"""All that the tiny config asks for: the next run starts only when the one before has left every slot."""


@dataclass(frozen=True)
class Way:
    """To end a run."""

    name: str
    end: Callable[[GrpoProcess], None]
    exit_code: int
    joins: bool
    """Joins a Ray cluster that outlives it; otherwise it starts its own."""
    says: str = ""
    """Pattern of the one line with which it ends."""
    cumem: str | None = None
    """`NCCL_CUMEM_ENABLE` of the driver."""
    allocator: str | None = None
    """Its `PYTORCH_CUDA_ALLOC_CONF`."""


def kill_driver(run: GrpoProcess) -> None:
    run.process.kill()


def kill_engine_actor(run: GrpoProcess) -> None:
    (actor,) = run.named("ray::SGLangGenerationWorker")
    actor.kill()


def kill_trainer_rank(run: GrpoProcess) -> None:
    _, rank = run.named("ray::DTensorPolicy")
    rank.kill()


def press_ctrl_c_twice(run: GrpoProcess) -> None:
    """As a terminal does: to the whole foreground group, Ray's daemons among it."""
    for _ in range(2):
        os.killpg(run.process.pid, signal.SIGINT)
        time.sleep(1.0)


WAYS = (
    Way("sigkill_of_driver", kill_driver, -signal.SIGKILL, joins=False),
    Way(
        "sigkill_of_engine_actor",
        kill_engine_actor,
        1,
        joins=True,
        says="engine 0 at http",
        cumem="1",
        allocator="expandable_segments:True",
    ),
    Way(
        "sigkill_of_trainer_rank",
        kill_trainer_rank,
        1,
        joins=False,
        says=r"policy: rank \d .* all ranks ended: its process has ended \(killed, or out of memory\)",
    ),
    Way("sigterm_of_driver", lambda run: run.process.terminate(), 128 + signal.SIGTERM, joins=True, cumem="0"),
    Way("ctrl_c", press_ctrl_c_twice, 128 + signal.SIGINT, joins=False, allocator="expandable_segments:False"),
)


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """A Ray cluster that outlives its runs."""
    ray.init(
        address="local",
        num_cpus=NUM_SLOTS,
        object_store_memory=512 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.mark.timeout(1800)
def test_whatever_ends_a_run_leaves_nothing_and_the_next_starts_at_once(ray_address: str, tmp_path: Path) -> None:
    ended: GrpoProcess | None = None
    ended_s = 0.0
    for way in WAYS:
        with GrpoProcess(way.name, tmp_path, environment_of(way, ray_address)) as run:
            if ended is not None:
                ended.assert_gone(ended_s)
            run.wait_for_step(1)
            assert len(run.look()) > 7
            assert_both_ends_have_the_drivers_environment(run, way)
            way.end(run)
            assert run.process.wait(timeout=60) == way.exit_code, run.errors()[-3000:]
        ended, ended_s = run, time.monotonic()
        told = [line for line in run.errors().splitlines() if "the run has ended" in line]
        assert len(told) == bool(way.says)
        assert all(re.match(f"run_grpo.py: the run has ended: .*{way.says}", line) for line in told), told
        assert "Traceback" not in run.errors() or not way.says
    run.assert_gone(ended_s)
    assert_all_slots_are_free(time.monotonic() + GONE_WITHIN_S)


def environment_of(way: Way, ray_address: str) -> dict[str, str]:
    given = {"RAY_ADDRESS": ray_address if way.joins else None, CUMEM: way.cumem, ALLOCATOR: way.allocator}
    return {name: value for name, value in given.items() if value is not None}


def assert_both_ends_have_the_drivers_environment(run: GrpoProcess, way: Way) -> None:
    """As the kernel shows it: the variables that trainer and engine must agree on, whatever node they are on."""
    driver = psutil.Process(run.process.pid).environ()
    assert (driver.get(CUMEM), driver.get(ALLOCATOR)) == (way.cumem, way.allocator)
    ranks, actors, schedulers = map(run.named, ("ray::DTensorPolicy", "ray::SGLangGeneration", "sglang::scheduler"))
    assert [len(found) for found in (ranks, actors, schedulers)] == [2, 1, 1]
    for process in (*ranks, *actors, *schedulers):
        environment = process.environ()
        assert (environment.get(CUMEM), environment.get(ALLOCATOR)) == (way.cumem or "0", way.allocator)


def assert_all_slots_are_free(end_s: float) -> None:
    """An actor that is left holds one."""
    while (free := ray.available_resources().get("CPU", 0)) < NUM_SLOTS and time.monotonic() < end_s:
        time.sleep(0.5)
    assert free == NUM_SLOTS


def test_nothing_outlives_a_driver_that_is_killed_while_its_engine_starts(tmp_path: Path) -> None:
    """Ray's agents and SGLang's processes do not look for their parents yet."""
    with GrpoProcess("starting", tmp_path, {}) as run:
        end_s = time.monotonic() + 120
        while not run.named("sglang.launch_server") and time.monotonic() < end_s:
            time.sleep(0.2)
            run.look()
        assert run.named("sglang.launch_server")
    run.assert_gone(time.monotonic())
