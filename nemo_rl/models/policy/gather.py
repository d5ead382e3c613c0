"""Shards of all trainer ranks -> whole tensors on rank 0, many tensors in one message.

Other ranks never hold a whole tensor. Each sends its blocks of several tensors in one message, from which rank 0 copies
them to where they belong. The block of a tensor that has a message of its own is received there, if that is contiguous.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nemo_rl.models.policy.shards import block_of, first_copies, is_first_copy


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

    def places(self) -> dict[int, torch.Tensor]:
        """On rank 0: for every rank that sends, and for rank 0 itself, the view of `into` that its block goes to."""
        assert self.into is not None, "rank 0 needs a place for every tensor"
        if not isinstance(self.value, DTensor):
            return {0: self.into}
        return {rank: block_of(self.into, self.value, at) for rank, at in first_copies(self.value)}

    def own(self) -> torch.Tensor:
        return self.value.to_local() if isinstance(self.value, DTensor) else self.value

    def own_in(self, shape: torch.Size) -> torch.Tensor:
        """Of another shape where the block is packed of parts."""
        own = self.own()
        return own if own.shape == shape else own.reshape(shape)


def gather_to_rank0(gathers: Sequence[Gather], message_bytes: int, device: torch.device) -> None:
    """Fill `into` of each on rank 0. Collective: every rank calls it with the same tensors in the same order.

    Args:
        message_bytes: of the tensors that share a message; a larger tensor has one of its own.
        device: where the bytes travel; shards that were offloaded are copied there.
    """
    for together in _messages(gathers, message_bytes):
        _gather_message(together, device)


def _messages(gathers: Sequence[Gather], message_bytes: int) -> Iterator[list[Gather]]:
    message: list[Gather] = []
    num_bytes = 0
    for gather in gathers:
        if message and num_bytes + gather.num_bytes > message_bytes:
            yield message
            message, num_bytes = [], 0
        message.append(gather)
        num_bytes += gather.num_bytes
    if message:
        yield message


def _gather_message(gathers: list[Gather], device: torch.device) -> None:
    # Wider dtypes first, so that each offset divides by the item size.
    gathers = sorted(gathers, key=lambda gather: -gather.dtype.itemsize)
    if gathers[0].into is not None:
        _receive(gathers, device)
        return
    sent = [gather for gather in gathers if isinstance(gather.value, DTensor) and is_first_copy(gather.value)]
    own = [gather.own() for gather in sent]
    if any(block.numel() for block in own):
        message, parts = _make_message(own, [gather.dtype for gather in sent], device)
        _copy_all(parts, own)
        for work in _start([dist.P2POp(dist.isend, message, 0)]):
            work.wait()


def _receive(gathers: list[Gather], device: torch.device) -> None:
    places = [gather.places() for gather in gathers]
    messages: dict[int, torch.Tensor] = {}
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for rank in sorted({rank for of_tensor in places for rank in of_tensor} - {0}):
        blocks = [of_tensor[rank] for of_tensor in places if rank in of_tensor]
        if not any(block.numel() for block in blocks):
            continue
        if len(blocks) == 1 and blocks[0].is_contiguous():
            messages[rank] = blocks[0].flatten().view(torch.uint8)
        else:
            messages[rank], parts = _make_message(blocks, [block.dtype for block in blocks], device)
            copies += zip(blocks, parts, strict=True)
    works = _start([dist.P2POp(dist.irecv, message, rank) for rank, message in messages.items()])
    own_places = [of_tensor[0] for of_tensor in places]
    _copy_all(own_places, [gather.own_in(place.shape) for gather, place in zip(gathers, own_places, strict=True)])
    for work in works:
        work.wait()
    _copy_all([block for block, _ in copies], [part for _, part in copies])


def _make_message(
    blocks: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """uint8 `[bytes]` for the blocks one after another, and its parts in their shapes."""
    sizes = [block.numel() * dtype.itemsize for block, dtype in zip(blocks, dtypes, strict=True)]
    message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    pieces = zip(message.split(sizes), blocks, dtypes, strict=True)
    return message, [piece.view(dtype).view(block.shape) for piece, block, dtype in pieces]


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Few launches for many tensors."""
    pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if target.numel()]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _start(operations: list[dist.P2POp]) -> list[dist.Work]:
    works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
    return works
