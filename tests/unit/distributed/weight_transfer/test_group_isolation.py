"""The weight-update group is none of torch.distributed's: it touches neither its registry nor its default group."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_engine import GlooEngine
from torch.distributed import distributed_c10d

from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.weight_transfer.rollout_engines import connect_rollout_engines_from_distributed


def refuse() -> None:
    raise RuntimeError("no")


def registry() -> tuple[list[str], int, torch.device | None]:
    world = distributed_c10d._world
    names = sorted(world.pg_names.values())
    return names, world.group_count, distributed_c10d._get_default_group().bound_device_id


def trainer_rank(rank: int, folder: str, fails: bool) -> None:
    """Rank 0 alone makes a weight-update group beside a default group with a bound device; then both make a subgroup."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    distributed_c10d._get_default_group().bound_device_id = torch.device("cpu", 0)
    before = registry()
    assert before[2] == torch.device("cpu", 0)
    if rank == 0:
        engine = GlooEngine("engine 0", on_join=refuse if fails else None)
        try:
            group = connect_rollout_engines_from_distributed(
                rollout_engines=[engine],
                engine_gpu_counts=[1],
                group_name="refit",
                backend="gloo",
                master_address="127.0.0.1",
                deadline=Deadline(10),
            )
            assert not fails
            assert registry() == before
            group.close()
        except TransferError:
            assert fails
        assert registry() == before
    # torch makes no subgroup of CPU ranks that are bound to a device.
    distributed_c10d._get_default_group().bound_device_id = None
    subgroup = dist.new_group([0, 1])
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=subgroup)
    Path(folder, f"rank{rank}").write_text(str(total.item()))
    dist.destroy_process_group()


@pytest.mark.parametrize("fails", [False, True], ids=["it forms", "it does not form"])
def test_rank_0_alone_makes_a_group_and_subgroups_still_work(tmp_path: Path, fails: bool) -> None:
    torch.multiprocessing.spawn(trainer_rank, (str(tmp_path), fails), nprocs=2)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["3.0", "3.0"]
