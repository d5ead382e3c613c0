"""Ranks on real Ray: what they answer, and that none is left waiting when one fails."""

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorUnschedulableError, ObjectLostError, OutOfMemoryError, RayError, RuntimeEnvSetupError
from torch.distributed import TCPStore

from nemo_rl.distributed import worker_group
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


class RayOfOneFailure:
    """Two actors, of which the first ends in `error` and the second never answers."""

    def __init__(self, error: RayError) -> None:
        self.error = error
        self.killed: list[object] = []

    def remote(self, worker_class: type) -> "RayOfOneFailure":
        return self

    def options(self, **options: object) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda **kwargs: SimpleNamespace(work=SimpleNamespace(remote=object)))

    def wait(self, refs: list[object], timeout: float) -> tuple[list[object], list[object]]:
        return (refs[:1], refs[1:]) if len(refs) == 2 else ([], refs)

    def get(self, ref: object, timeout: float) -> None:
        raise self.error

    def kill(self, worker: object) -> None:
        self.killed.append(worker)


LOW_MEMORY = OutOfMemoryError("Task was killed due to the node running low on memory.\nMemory on the node was 0.95\n")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (LOW_MEMORY, "OutOfMemoryError: Task was killed due to the node running low on memory."),
        (RuntimeEnvSetupError("no disk"), "RuntimeEnvSetupError: Failed to set up runtime environment."),
        (ActorUnschedulableError("node gone"), "ActorUnschedulableError: The actor is not schedulable: node gone"),
        (ObjectLostError("id", "owner", ""), "ObjectLostError: "),
    ],
    ids=["memory monitor", "environment", "placement", "answer"],
)
def test_a_rank_that_ends_in_any_of_rays_ways_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, error: RayError, says: str
) -> None:
    fake = RayOfOneFailure(error)
    monkeypatch.setattr(worker_group, "ray", fake)
    group = RayWorkerGroup(
        name="ranks",
        worker_class=Rank,
        cluster=SimpleNamespace(num_bundles=2, actor_options=lambda rank, env: {}),  # type: ignore[arg-type]
        env={},
        make_kwargs=lambda rank: {},
    )
    with pytest.raises(WorkerGroupError) as caught:
        group.run("work", timeout_s=30)
    text = str(caught.value)
    assert text.startswith(f"ranks: rank 0 failed in work, all ranks ended: {says}")
    assert text.endswith("; its log is in the run folder")
    assert "\n" not in text
    assert len(fake.killed) == 2


def test_the_port_of_the_ranks_is_theirs_until_they_listen(cluster: RayVirtualCluster) -> None:
    address, port = cluster.reserve_rendezvous()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((address, port))
    store = TCPStore(address, port, is_master=True, wait_for_workers=False)
    assert store.port == port
    cluster.release_rendezvous()
