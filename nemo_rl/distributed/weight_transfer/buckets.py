"""Named tensors -> buckets of bounded size -> one flat buffer each."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from nemo_rl.distributed.weight_transfer.manifest import Manifest

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
    params_generator: Iterable[NamedTensor], buffer_size_bytes: int, manifest: Manifest
) -> Iterator[list[NamedTensor]]:
    """Group tensors, in order, into the manifest's buckets of at most `buffer_size_bytes`.

    Within a bucket wider dtypes come first, so that each tensor's offset divides by its item size. Whatever comes
    beyond the manifest makes a last bucket of its own: the walk goes to the end.
    """
    tensors = iter(params_generator)
    for length in manifest.bucket_lengths(buffer_size_bytes):
        if bucket := list(islice(tensors, length)):
            yield _widest_first(bucket)
    if rest := list(tensors):
        yield _widest_first(rest)


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
