"""Ranks on real Ray: what they answer, and that none is left waiting when one fails."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, start_ray
from nemo_rl.distributed.worker_group import RayWorkerGroup, WorkerGroupError

# The workers cannot import a test file.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Rank:
    """A worker that does as it is told."""

    def __init__(self, rank: int, folder: str):
        self.rank = rank
        Path(folder, f"pid{rank}").write_text(str(os.getpid()))

    def add(self, x: int, *, y: int) -> int:
        return 10 * self.rank + x + y

    def fail_on(self, rank: int, others_wait_s: float) -> None:
        if self.rank == rank:
            raise KeyError(f"rank {rank} says no")
        time.sleep(others_wait_s)

    def die_on(self, rank: int) -> None:
        if self.rank == rank:
            os._exit(1)
        time.sleep(60)

    def die_and_fail(self, dead: int) -> None:
        """The dead rank's peer notices first, as in a collective."""
        if self.rank == dead:
            time.sleep(0.5)
            os._exit(1)
        raise ConnectionError("closed by peer")

    def environment(self) -> str:
        return os.environ["NRL_TEST"]


class Broken(Rank):
    def __init__(self, rank: int, folder: str):
        raise ValueError("policy.model_name: got 'm'; no such model")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayVirtualCluster]:
    start_ray(device="cpu", num_slots=3, num_nodes=1)
    yield RayVirtualCluster(name="ranks", slots=[1] * 2, device="cpu")
    ray.shutdown()


@pytest.fixture
def group(cluster: RayVirtualCluster, tmp_path: Path) -> Iterator[RayWorkerGroup]:
    group = RayWorkerGroup(
        name="ranks",
        worker_class=Rank,
        cluster=cluster,
        env={"NRL_TEST": "here"},
        make_kwargs=lambda rank: {"rank": rank, "folder": str(tmp_path)},
    )
    group.ready(timeout_s=60)
    yield group
    group.shutdown()


def alive(folder: Path) -> list[bool]:
    return [Path("/proc", (folder / f"pid{rank}").read_text()).exists() for rank in range(2)]


def ends_within(folder: Path, timeout_s: float) -> bool:
    end_s = time.monotonic() + timeout_s
    while any(alive(folder)) and time.monotonic() < end_s:
        time.sleep(0.1)
    return not any(alive(folder))


def test_answers_come_in_rank_order_and_arguments_reach_their_rank(group: RayWorkerGroup) -> None:
    assert group.run("add", timeout_s=30, per_rank=[(1,), (2,)], y=100) == [101, 112]
    assert group.run("environment", timeout_s=30) == ["here", "here"]


def test_an_error_that_every_rank_answers_leaves_the_group_alive(group: RayWorkerGroup, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="rank 1 says no"):
        group.run("fail_on", timeout_s=30, rank=1, others_wait_s=0.0)
    assert group.run("add", timeout_s=30, per_rank=[(1,), (1,)], y=0) == [1, 11]
    assert alive(tmp_path) == [True, True]


def test_a_dead_rank_ends_the_others(group: RayWorkerGroup, tmp_path: Path) -> None:
    start_s = time.monotonic()
    with pytest.raises(WorkerGroupError, match="rank 0 failed in die_on, all ranks ended"):
        group.run("die_on", timeout_s=60, rank=0)
    assert time.monotonic() - start_s < 30
    assert ends_within(tmp_path, 10)
    with pytest.raises(WorkerGroupError, match="the ranks have ended"):
        group.run("environment", timeout_s=1)


def test_the_rank_that_died_is_named_and_not_the_one_that_noticed(group: RayWorkerGroup) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        group.run("die_and_fail", timeout_s=60, dead=1)
    assert str(caught.value) == (
        "ranks: rank 1 failed in die_and_fail, all ranks ended: its process has ended (killed, or out of memory); "
        "its log is in the run folder"
    )


def test_a_constructor_that_raises_is_told_in_its_own_words(cluster: RayVirtualCluster, tmp_path: Path) -> None:
    group = RayWorkerGroup(
        name="ranks",
        worker_class=Broken,
        cluster=cluster,
        env={},
        make_kwargs=lambda rank: {"rank": rank, "folder": str(tmp_path)},
    )
    with pytest.raises(
        WorkerGroupError, match=r"all ranks ended: ValueError: policy.model_name: got 'm'; no such model"
    ):
        group.ready(timeout_s=60)


def test_ranks_that_do_not_answer_in_time_are_ended_by_name(group: RayWorkerGroup, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"fail_on not done within 1 s on ranks \[0, 1\]; all ranks ended"):
        group.run("fail_on", timeout_s=1, rank=7, others_wait_s=60.0)
    assert ends_within(tmp_path, 10)


def test_more_slots_than_the_cluster_has(cluster: RayVirtualCluster) -> None:
    with pytest.raises(TimeoutError, match="too many: asked 128 CPU in 2 bundles, free"):
        RayVirtualCluster(name="too many", slots=[64] * 2, device="cpu", timeout_s=1.0)
