"""Which part of a whole tensor each rank holds, for parameters of FSDP2 alone and of FSDP2 over tensor parallelism."""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

DP_AXIS = "dp_shard"
TP_AXIS = "tp"


def make_mesh(device_type: str, world_size: int, tensor_parallel_size: int = 1) -> DeviceMesh:
    """The trainer ranks as `[dp_shard]`, or as `[dp_shard, tp]`: ranks of one tensor-parallel group follow one another.

    Collective.
    """
    if tensor_parallel_size == 1:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=(DP_AXIS,))
    shape = (world_size // tensor_parallel_size, tensor_parallel_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=(DP_AXIS, TP_AXIS))


def block_of(whole: torch.Tensor, shard: DTensor, coordinate: Sequence[int]) -> torch.Tensor:
    """View of `whole` that belongs to the rank at `coordinate` of the shard's mesh.

    Flattened it has the order of that rank's local tensor. Its rank is higher where the local tensor is packed of parts
    that were divided one by one, such as the stacked gate and up projections of experts.

    Raises:
        NotImplementedError: for placements that neither FSDP2 nor a tensor-parallel plan makes.
    """
    _check_placements(shard.device_mesh, shard.placements)
    # Tensor parallelism, on the last axis, divides first: FSDP2 shards what is left.
    for axis in reversed(range(shard.device_mesh.ndim)):
        placement: Any = shard.placements[axis]
        if isinstance(placement, Replicate):
            continue
        dim = placement.dim
        if axis > 0 and isinstance(placement, _StridedShard):
            whole = whole.unflatten(dim, (placement.split_factor, -1))
            dim += 1
        whole = _chunk(whole, dim, coordinate[axis], shard.device_mesh.size(axis))
    return whole


def own_block(whole: torch.Tensor, shard: DTensor) -> torch.Tensor:
    """`block_of` this rank."""
    coordinate = shard.device_mesh.get_coordinate()
    assert coordinate is not None, "every trainer rank is in the mesh"
    return block_of(whole, shard, coordinate)


def first_copies(shard: DTensor) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Ranks (with their coordinates) that hold the blocks of rank 0's column; of equal blocks, the first. Rank 0 leads.

    Nothing on ranks whose mesh rank 0 is not in: they hold copies.
    """
    return _first_copies(shard.device_mesh, shard.placements)


def is_first_copy(shard: DTensor) -> bool:
    """Whether this rank is in `first_copies`: over all ranks, they hold every element once."""
    return any(rank == dist.get_rank() for rank, _ in first_copies(shard))


# Cached: a model has thousands of tensors and two or three ways to place them.
@lru_cache
def _first_copies(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    ranks = mesh.mesh.flatten().tolist()
    if 0 not in ranks:
        return ()
    places = zip(ranks, itertools.product(*map(range, mesh.shape)), strict=True)
    copied = [axis for axis, placement in enumerate(placements) if placement.is_replicate()]
    return tuple((rank, at) for rank, at in places if not any(at[axis] for axis in copied))


@lru_cache
def _check_placements(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
    data: Any
    tensor: Any
    data, tensor = (*placements, None)[:2]
    rows_divided = mesh.size(1) if isinstance(tensor, Shard) and tensor.dim == 0 else 1
    split_factor = data.split_factor if isinstance(data, _StridedShard) else 1
    is_known = (
        mesh.ndim <= 2
        and (tensor is None or isinstance(tensor, Replicate | Shard | _StridedShard))
        and not (isinstance(tensor, _StridedShard) and tensor.dim == 0)
        and (
            isinstance(data, Replicate)
            or (
                isinstance(data, Shard | _StridedShard)
                and split_factor == rows_divided
                and (tensor is None or data.dim == 0)
            )
        )
    )
    if not is_known:
        raise NotImplementedError(f"a tensor that is placed as {placements} on {mesh}")


def _chunk(whole: torch.Tensor, dim: int, index: int, num_chunks: int) -> torch.Tensor:
    """As torch.chunk deals out, with empty chunks at the end where there are too few."""
    if num_chunks == 1:
        return whole
    size = whole.shape[dim]
    each = -(-size // num_chunks)
    start = min(index * each, size)
    return whole.narrow(dim, start, min(each, size - start))
