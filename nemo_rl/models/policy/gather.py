"""Row shards of all trainer ranks -> whole tensors on rank 0, many tensors in one message.

Other ranks never hold a whole tensor. A message goes to the place where its rows belong if it holds one tensor; several
small ones share a message and are copied from there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class Gather:
    """One tensor to be gathered."""

    value: torch.Tensor
    """A DTensor, or a tensor that every rank holds whole."""
    dtype: torch.dtype
    """Cast to it before it travels: bfloat16 moves half the bytes of float32 shards."""
    into: torch.Tensor | None
    """Contiguous, on rank 0: where the whole tensor goes."""

    @property
    def num_bytes(self) -> int:
        return self.value.numel() * self.dtype.itemsize

    @property
    def is_in_rows(self) -> bool:
        """Whether rank r holds the r-th part of the rows and nothing else."""
        value = self.value
        return isinstance(value, DTensor) and value.device_mesh.ndim == 1 and value.placements == (Shard(0),)

    def rows(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """First row of a rank and the first beyond; as torch.chunk deals them out."""
        num_rows = self.value.shape[0]
        each = -(-num_rows // num_ranks)
        return min(rank * each, num_rows), min((rank + 1) * each, num_rows)

    def part_bytes(self, rank: int, num_ranks: int) -> int:
        start, end = self.rows(rank, num_ranks)
        return self.num_bytes // max(1, self.value.shape[0]) * (end - start)


def gather_to_rank0(gathers: Sequence[Gather], message_bytes: int, device: torch.device) -> None:
    """Fill `into` of each on rank 0. Collective: every rank calls it with the same tensors in the same order.

    Args:
        message_bytes: of the tensors that share a message; a larger tensor has one of its own.
        device: where the bytes travel; shards that were offloaded are copied there.
    """
    for together in _messages(gathers, message_bytes):
        first = together[0]
        if first.is_in_rows:
            _gather_rows(together, device)
        else:
            value = first.value.to(first.dtype)
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if first.into is not None:
                first.into.copy_(whole)


def _messages(gathers: Sequence[Gather], message_bytes: int) -> Iterator[list[Gather]]:
    message: list[Gather] = []
    num_bytes = 0
    for gather in gathers:
        fits = num_bytes + gather.num_bytes <= message_bytes
        if message and not (fits and gather.is_in_rows and message[0].is_in_rows):
            yield message
            message, num_bytes = [], 0
        message.append(gather)
        num_bytes += gather.num_bytes
    if message:
        yield message


def _gather_rows(gathers: list[Gather], device: torch.device) -> None:
    mesh = gathers[0].value.device_mesh  # type: ignore[attr-defined]
    group = mesh.get_group()
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    # Wider dtypes first, so that each offset divides by the item size.
    gathers = sorted(gathers, key=lambda gather: -gather.dtype.itemsize)
    own = [gather.value.to_local() for gather in gathers]  # type: ignore[attr-defined]
    if rank == 0:
        _receive(gathers, own, group, num_ranks, device)
    elif num_bytes := sum(gather.part_bytes(rank, num_ranks) for gather in gathers):
        message = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        _copy_all(_parts(message, gathers, rank, num_ranks), own)
        _exchange([dist.P2POp(dist.isend, message, group=group, group_peer=0)])


def _receive(
    gathers: list[Gather],
    own: list[torch.Tensor],
    group: dist.ProcessGroup,
    num_ranks: int,
    device: torch.device,
) -> None:
    places = {rank: _places(gathers, rank, num_ranks) for rank in range(num_ranks)}
    messages: dict[int, torch.Tensor] = {}
    for rank in range(1, num_ranks):
        num_bytes = sum(gather.part_bytes(rank, num_ranks) for gather in gathers)
        if num_bytes and len(gathers) == 1:
            messages[rank] = places[rank][0].flatten().view(torch.uint8)
        elif num_bytes:
            messages[rank] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    works = _start([dist.P2POp(dist.irecv, message, group=group, group_peer=r) for r, message in messages.items()])
    _copy_all(places[0], own)
    for work in works:
        work.wait()
    if len(gathers) > 1:
        for rank, message in messages.items():
            _copy_all(places[rank], _parts(message, gathers, rank, num_ranks))


def _places(gathers: list[Gather], rank: int, num_ranks: int) -> list[torch.Tensor]:
    """Where the rows of a rank belong."""
    places = []
    for gather in gathers:
        assert gather.into is not None, "rank 0 needs a place for every tensor"
        start, end = gather.rows(rank, num_ranks)
        places.append(gather.into[start:end])
    return places


def _parts(message: torch.Tensor, gathers: list[Gather], rank: int, num_ranks: int) -> list[torch.Tensor]:
    """The rows of a rank within its message: uint8 `[bytes]`."""
    parts, offset = [], 0
    for gather in gathers:
        start, end = gather.rows(rank, num_ranks)
        size = gather.part_bytes(rank, num_ranks)
        part = message[offset : offset + size].view(gather.dtype)
        parts.append(part.view(end - start, *gather.value.shape[1:]))
        offset += size
    return parts


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Few launches for many tensors."""
    pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if target.numel()]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _start(operations: list[dist.P2POp]) -> list[dist.Work]:
    works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
    return works


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in _start(operations):
        work.wait()
