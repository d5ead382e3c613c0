"""Named tensors -> buckets of bounded size -> one flat buffer each."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

NamedTensor = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class BucketHeader:
    """What an engine is told before the bytes come."""

    index: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    """As torch names them, without the prefix: `bfloat16`."""
    shapes: tuple[tuple[int, ...], ...]
    flattened: bool
    """One uint8 broadcast for the bucket; otherwise one per tensor, in the order of `names`."""

    def describe(self) -> str:
        return f"bucket {self.index} ({len(self.names)} tensors, {self.names[0]} ... {self.names[-1]})"


def iter_named_tensor_buckets(
    params_generator: Iterable[NamedTensor], buffer_size_bytes: int
) -> Iterator[list[NamedTensor]]:
    """Group tensors, in order, into buckets of at most `buffer_size_bytes`; a larger tensor has its own bucket.

    Within a bucket wider dtypes come first, so that each tensor's offset divides by its item size.
    """
    bucket: list[NamedTensor] = []
    size_bytes = 0
    for name, tensor in params_generator:
        if bucket and size_bytes + tensor.nbytes > buffer_size_bytes:
            yield _widest_first(bucket)
            bucket, size_bytes = [], 0
        bucket.append((name, tensor))
        size_bytes += tensor.nbytes
    if bucket:
        yield _widest_first(bucket)


def _widest_first(bucket: list[NamedTensor]) -> list[NamedTensor]:
    return sorted(bucket, key=lambda item: -item[1].element_size())


def make_header(index: int, bucket: list[NamedTensor], *, flattened: bool) -> BucketHeader:
    return BucketHeader(
        index=index,
        names=tuple(name for name, _ in bucket),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket),
        shapes=tuple(tuple(tensor.shape) for _, tensor in bucket),
        flattened=flattened,
    )


def flatten_bucket(bucket: list[NamedTensor]) -> torch.Tensor:
    """The tensors' bytes one behind the other, without padding: uint8 `[bytes]`."""
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for _, tensor in bucket])
