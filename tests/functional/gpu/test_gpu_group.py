"""Trainers whose group is bound to their GPUs, and beside it a weight-update group of rank 0 and an engine, all NCCL."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore, distributed_c10d

from nemo_rl.distributed.weight_transfer.buckets import BucketHeader, make_header
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.weight_transfer.preflight import CUMEM_VARIABLE
from nemo_rl.distributed.weight_transfer.process_group import WeightUpdateGroup, event_now
from nemo_rl.distributed.weight_transfer.receiver import GroupSpec
from nemo_rl.distributed.weight_transfer.rollout_engines import (
    connect_rollout_engines_from_distributed,
    disconnect_rollout_engines_from_distributed,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

NUM_TRAINERS = 2
TIMEOUT_S = 60.0


def payload() -> torch.Tensor:
    """uint8 `[8 MiB]`, on the CPU."""
    return (torch.arange(8 * 2**20) % 251).to(torch.uint8)


class RemoteEngine:
    """Implements `Receiver` for `engine_main` in another process, one call after the other."""

    name = "engine 0"
    takes_flattened = True

    def __init__(self, address: str) -> None:
        self.nccl_cumem_enable = os.environ.get(CUMEM_VARIABLE)
        self._connection = Client(address)
        self._pool = ThreadPoolExecutor(1)

    def join(self, group: GroupSpec, rank_offset: int, timeout_s: float) -> Future[None]:
        return self._pool.submit(self._call, "join", group, rank_offset, timeout_s)

    def announce(self, header: BucketHeader, group_name: str, timeout_s: float) -> Future[None]:
        return self._pool.submit(self._call, "receive")

    def leave(self, group_name: str, timeout_s: float) -> Future[None]:
        return self._pool.submit(self._call, "leave")

    def end(self) -> None:
        self._pool.submit(self._connection.send, None).result()

    def _call(self, *message: Any) -> None:
        self._connection.send(message)
        if error := self._connection.recv():
            raise RuntimeError(error)


class Engine:
    """The other end of `RemoteEngine`: NCCL on the second GPU, under the keys that SGLang's torch uses."""

    def __init__(self, folder: str, *, refuses: bool) -> None:
        self._folder, self._refuses = folder, refuses
        self._backend: Any = None

    def join(self, group: GroupSpec, rank: int, timeout_s: float) -> None:
        if self._refuses:
            raise RuntimeError("no")
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(group.master_address, group.master_port, is_master=False, timeout=timeout)
        own_store = PrefixStore("cuda/", PrefixStore(f"{group.name}/", PrefixStore(group.name, store)))
        options = dist.ProcessGroupNCCL.Options()
        self._backend = dist.ProcessGroupNCCL(own_store, rank, group.world_size, options)

    def receive(self) -> None:
        received = torch.zeros_like(payload(), device=torch.device("cuda", 1))
        options = BroadcastOptions()
        options.rootRank = 0
        self._backend.broadcast([received], options).wait()
        torch.save(received.cpu(), f"{self._folder}/received.pt")

    def leave(self) -> None:
        if self._backend is None:
            raise RuntimeError("there is no such group")
        self._backend.abort()
        self._backend = None


def engine_main(folder: str, refuses: bool) -> None:
    torch.cuda.set_device(1)
    engine = Engine(folder, refuses=refuses)
    actions = {"join": engine.join, "receive": engine.receive, "leave": engine.leave}
    with Listener(f"{folder}/engine") as listener:
        Path(folder, "listens").touch()
        with listener.accept() as connection:
            while (message := connection.recv()) is not None:
                try:
                    actions[message[0]](*message[1:])
                    connection.send(None)
                except RuntimeError as error:
                    connection.send(str(error))


def registry() -> tuple[list[str], int, torch.device | None]:
    world = distributed_c10d._world
    bound = distributed_c10d._get_default_group().bound_device_id
    return sorted(world.pg_names.values()), world.group_count, bound


def process_main(index: int, folder: str, refuses: bool) -> None:
    if index == NUM_TRAINERS:
        engine_main(folder, refuses)
        return
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=index, world_size=NUM_TRAINERS, device_id=device
    )
    backend = distributed_c10d._get_default_group()._get_backend(device)
    dist.all_reduce(torch.zeros(1, device=device))
    before, num_splits = registry(), backend.comm_split_count()
    assert before[2] == device
    if index == 0:
        use_a_weight_update_group(folder, refuses)
    assert registry() == before
    assert backend.comm_split_count() == num_splits
    # A bound group is split for this one: the counter does count.
    subgroup = dist.new_group([0, 1])
    total = torch.tensor([index + 1.0], device=device)
    dist.all_reduce(total, group=subgroup)
    assert backend.comm_split_count() > num_splits
    Path(folder, f"rank{index}").write_text(str(total.item()))
    dist.destroy_process_group()


def use_a_weight_update_group(folder: str, refuses: bool) -> None:
    """On trainer rank 0 alone: it forms, carries a bucket and ends; or it does not form."""
    limit = Deadline(TIMEOUT_S)
    while not Path(folder, "listens").exists():
        limit.require("the engine's process")
        time.sleep(0.05)
    engine = RemoteEngine(f"{folder}/engine")
    before = registry()
    try:
        group = connect([engine])
        assert not refuses
        assert registry() == before
        tensor = payload().to("cuda:0")
        header = make_header(0, [("w", tensor)], flattened=True)
        answer = engine.announce(header, group.spec.name, TIMEOUT_S)
        group.send([tensor], TIMEOUT_S, event_now(tensor)).result()
        answer.result(TIMEOUT_S)
        disconnect_rollout_engines_from_distributed(rollout_engines=[engine], group=group, deadline=Deadline(TIMEOUT_S))
    except TransferError:
        assert refuses
    finally:
        engine.end()
    assert registry() == before


def connect(engines: Sequence[RemoteEngine]) -> WeightUpdateGroup:
    return connect_rollout_engines_from_distributed(
        rollout_engines=engines,
        engine_gpu_counts=[1],
        group_name="refit",
        backend="nccl",
        master_address="127.0.0.1",
        deadline=Deadline(TIMEOUT_S),
    )


@pytest.mark.parametrize("refuses", [False, True], ids=["it forms", "it does not form"])
def test_a_weight_update_group_beside_bound_nccl_ranks_splits_nothing(tmp_path: Path, refuses: bool) -> None:
    torch.multiprocessing.spawn(process_main, (str(tmp_path), refuses), nprocs=NUM_TRAINERS + 1)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(NUM_TRAINERS)] == ["3.0", "3.0"]
    if not refuses:
        assert torch.equal(torch.load(tmp_path / "received.pt"), payload())
