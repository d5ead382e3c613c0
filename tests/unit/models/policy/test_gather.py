"""Shards of several ranks against the whole tensors that they were cut from."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from nemo_rl.models.policy.gather import Gather, gather_to_rank0

SHAPES = [(8, 16), (3,), (1,), (5, 7), (2, 3, 4), (64, 2)]
"""Even, uneven, and with fewer rows than ranks."""
COLUMNS, COPIES, INTEGERS = torch.arange(12.0).view(3, 4), torch.arange(4.0), torch.arange(6)
MESSAGE_BYTES = [1, 200, 1_000_000]
"""Each tensor by itself, some together, all together."""


def whole_tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def gather_rank(rank: int, num_ranks: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))
    values = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in whole_tensors()]
    # What is not in rows shares their messages.
    values.insert(2, distribute_tensor(COLUMNS, mesh, [Shard(1)]))
    values.insert(4, distribute_tensor(COPIES, mesh, [Replicate()]))
    values.append(INTEGERS)
    dtypes = [torch.bfloat16, torch.float32] * (len(values) // 2) + [torch.int64]
    for message_bytes in MESSAGE_BYTES:
        intos = [torch.zeros(value.shape, dtype=dtype) for value, dtype in zip(values, dtypes, strict=True)]
        gathers = [
            Gather(value, dtype, into if rank == 0 else None)
            for value, dtype, into in zip(values, dtypes, intos, strict=True)
        ]
        gather_to_rank0(gathers, message_bytes, torch.device("cpu"))
        if rank == 0:
            torch.save(intos, Path(folder, f"{message_bytes}.pt"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gathered_rows_are_the_whole_tensors(tmp_path: Path, num_ranks: int) -> None:
    torch.multiprocessing.spawn(gather_rank, (num_ranks, str(tmp_path)), nprocs=num_ranks)
    expected = whole_tensors()
    expected.insert(2, COLUMNS)
    expected.insert(4, COPIES)
    expected.append(INTEGERS)
    for message_bytes in MESSAGE_BYTES:
        gathered = torch.load(tmp_path / f"{message_bytes}.pt")
        assert len(gathered) == len(expected) == 9
        for tensor, whole in zip(gathered, expected, strict=True):
            assert torch.equal(tensor, whole.to(tensor.dtype))
