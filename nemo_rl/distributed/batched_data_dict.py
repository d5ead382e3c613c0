"""A batch: named tensors and lists that share their first dimension."""

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


class BatchedDataDict(UserDict[str, Any]):
    """Maps names to tensors `[batch, ...]` or lists of length `batch`, also of mappings of tensors."""

    @property
    def size(self) -> int:
        """Number of samples; raises ValueError where entries disagree."""
        sizes = {len(value) for value in self.data.values()}
        if len(sizes) > 1:
            raise ValueError(f"entries differ in batch size: { {k: len(v) for k, v in self.data.items()} }")
        return sizes.pop() if sizes else 0

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_values: Mapping[str, float] | None = None
    ) -> "BatchedDataDict":
        """Concatenate along the batch; tensors `[batch, seq]` are right-padded (0, or `pad_values[name]`)."""
        pads = pad_values or {}
        out = cls()
        for name in batches[0]:
            values = [batch[name] for batch in batches]
            if not isinstance(values[0], torch.Tensor):
                out[name] = [item for value in values for item in value]
            elif values[0].dim() < 2:
                out[name] = torch.cat(values)
            else:
                width = max(value.shape[1] for value in values)
                out[name] = torch.cat([_pad_to(value, width, pads.get(name, 0)) for value in values])
        return out

    def select_indices(self, indices: Sequence[int]) -> "BatchedDataDict":
        index = torch.as_tensor(indices, dtype=torch.long)
        return type(self)(
            {
                name: value[index] if isinstance(value, torch.Tensor) else [value[i] for i in indices]
                for name, value in self.data.items()
            }
        )

    def slice(self, start: int, end: int) -> "BatchedDataDict":
        return type(self)({name: value[start:end] for name, value in self.data.items()})

    def repeat_interleave(self, num_repeats: int) -> "BatchedDataDict":
        """Each sample `num_repeats` times in a row: prompts become groups."""
        return self.select_indices([i for i in range(self.size) for _ in range(num_repeats)])

    def shard_by_batch_size(self, shards: int) -> list["BatchedDataDict"]:
        """Split into `shards` equal runs of samples; raises ValueError when the batch does not divide."""
        if self.size % shards:
            raise ValueError(f"a batch of {self.size} samples does not divide into {shards} shards")
        step = self.size // shards
        return [self.slice(i * step, (i + 1) * step) for i in range(shards)]

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator["BatchedDataDict"]:
        """Runs of `microbatch_size` samples; the last may be shorter."""
        for start in range(0, self.size, microbatch_size):
            yield self.slice(start, start + microbatch_size)

    def to(self, device: torch.device | str) -> "BatchedDataDict":
        """Tensors, also those of mappings in lists; everything else is left as it is."""
        return type(self)({name: _moved(value, device) for name, value in self.data.items()})


def _moved(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: _moved(item, device) for name, item in value.items()}
    return [_moved(item, device) for item in value] if isinstance(value, list) else value


def _pad_to(value: torch.Tensor, width: int, pad: float) -> torch.Tensor:
    missing = width - value.shape[1]
    if not missing:
        return value
    filler = value.new_full((value.shape[0], missing, *value.shape[2:]), pad)
    return torch.cat([value, filler], dim=1)
