"""Named tensors -> buckets of bounded size -> one flat buffer each."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice

import torch

from nemo_rl.distributed.weight_transfer.manifest import Manifest, TensorSpec

NamedTensor = tuple[str, torch.Tensor]
NUM_BUFFERS = 2
"""One is filled while the other is sent."""


@dataclass(frozen=True)
class BucketLayout:
    """Where each tensor of a bucket lies in its flat buffer: wider dtypes first, so that offsets divide by item sizes."""

    specs: tuple[TensorSpec, ...]
    """In the order of the manifest."""

    @cached_property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each tensor by its name, as a part of `flat`: uint8 `[at least num_bytes]`."""
        views: dict[str, torch.Tensor] = {}
        start = 0
        widest_first = sorted(self.specs, key=lambda spec: -spec.dtype.itemsize)
        for dtype, of_dtype in groupby(widest_first, key=lambda spec: spec.dtype):
            specs = list(of_dtype)
            end = start + sum(spec.num_bytes for spec in specs)
            run = flat[start:end].view(dtype)
            first = run.storage_offset()
            for spec in specs:
                views[spec.name] = run.as_strided(spec.shape, spec.strides, first)
                first += spec.num_values
            start = end
        return views


def bucket_layouts(manifest: Manifest, buffer_size_bytes: int) -> list[BucketLayout]:
    """See `Manifest.bucket_lengths`."""
    specs = iter(manifest.specs)
    return [BucketLayout(tuple(islice(specs, length))) for length in manifest.bucket_lengths(buffer_size_bytes)]


class FlatBuffers:
    """Memory for buckets, used in turn: what was written stays until the buffer after the next is asked for."""

    def __init__(self, layouts: Sequence[BucketLayout], device: torch.device) -> None:
        self.num_bytes = max((layout.num_bytes for layout in layouts), default=0)
        self._buffers = [
            torch.empty(self.num_bytes, dtype=torch.uint8, device=device) for _ in range(min(NUM_BUFFERS, len(layouts)))
        ]
        self._num_taken = 0

    def fit(self, layouts: Sequence[BucketLayout]) -> bool:
        """Whether they are as large and as many as these buckets need."""
        num_bytes = max((layout.num_bytes for layout in layouts), default=0)
        return self.num_bytes == num_bytes and len(self._buffers) == min(NUM_BUFFERS, len(layouts))

    def next(self) -> torch.Tensor:
        """uint8 `[num_bytes]`."""
        self._num_taken += 1
        return self._buffers[self._num_taken % len(self._buffers)]


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
    """The tensors' bytes one behind the other, without padding: uint8 `[bytes]`. Copies nothing that lies so already."""
    tensors = [tensor for _, tensor in bucket]
    first, num_bytes = tensors[0], sum(tensor.nbytes for tensor in tensors)
    storage = first.untyped_storage()
    start = first.data_ptr()
    if _lie_in_a_row(tensors) and start + num_bytes <= storage.data_ptr() + storage.nbytes():
        flat = torch.empty(0, dtype=torch.uint8, device=first.device)
        return flat.set_(storage, start - storage.data_ptr(), (num_bytes,), (1,))
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors])


def _lie_in_a_row(tensors: Iterable[torch.Tensor]) -> bool:
    end: int | None = None
    for tensor in tensors:
        if not tensor.is_contiguous() or (end is not None and tensor.data_ptr() != end):
            return False
        end = tensor.data_ptr() + tensor.nbytes
    return True
