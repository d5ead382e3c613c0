"""Bucket edges and the flat layout, by exact values."""

import pytest
import torch
from gloo_engine import manifest_of

from nemo_rl.distributed.weight_transfer.buckets import (
    BucketLayout,
    NamedTensor,
    flatten_bucket,
    iter_named_tensor_buckets,
    make_header,
)
from nemo_rl.distributed.weight_transfer.manifest import TensorSpec


def tensors(*sizes: int) -> list[NamedTensor]:
    return [(f"t{i}", torch.full((size,), i, dtype=torch.bfloat16)) for i, size in enumerate(sizes)]


def names(buckets: list[list[NamedTensor]]) -> list[list[str]]:
    return [[name for name, _ in bucket] for bucket in buckets]


def buckets_of(named: list[NamedTensor], buffer_size_bytes: int) -> list[list[NamedTensor]]:
    return list(iter_named_tensor_buckets(named, buffer_size_bytes, manifest_of(named)))


def test_every_tensor_is_in_one_bucket_in_the_order_given() -> None:
    assert names(buckets_of(tensors(4, 4, 4, 2), 16)) == [["t0", "t1"], ["t2", "t3"]]


def test_no_tensors_no_bucket() -> None:
    assert buckets_of([], 8) == []


def test_a_walk_that_ends_early_or_late_is_walked_to_its_end() -> None:
    manifest = manifest_of(tensors(4, 4, 4))
    short = iter_named_tensor_buckets(tensors(4), 16, manifest)
    assert names(list(short)) == [["t0"]]
    long = iter_named_tensor_buckets(tensors(4, 4, 4, 1, 1), 16, manifest)
    assert names(list(long)) == [["t0", "t1"], ["t2"], ["t3", "t4"]]


def test_wider_dtypes_come_first_so_that_every_offset_is_aligned() -> None:
    mixed = [
        ("odd", torch.ones(3, dtype=torch.bfloat16)),
        ("wide", torch.ones(2)),
        ("byte", torch.ones(1, dtype=torch.uint8)),
    ]
    (bucket,) = buckets_of(mixed, 1000)
    header = make_header(0, bucket, flattened=True)
    assert header.names == ("wide", "odd", "byte")
    assert header.dtypes == ("float32", "bfloat16", "uint8")
    offset = 0
    for _, tensor in bucket:
        assert offset % tensor.element_size() == 0
        offset += tensor.nbytes
    assert flatten_bucket(bucket).nbytes == offset == 15


def test_the_flat_buffer_is_the_bytes_one_behind_the_other() -> None:
    matrix = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T  # not contiguous
    flat = flatten_bucket([("m", matrix), ("s", torch.tensor(7.0, dtype=torch.bfloat16))])
    assert flat.dtype == torch.uint8
    assert flat.view(torch.bfloat16).tolist() == [0, 3, 1, 4, 2, 5, 7]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("start", [0, 16])
def test_views_lie_one_behind_the_other_the_widest_first(start: int, device: str) -> None:
    planned: list[tuple[str, tuple[int, ...], torch.dtype]] = [
        ("matrix", (2, 3), torch.bfloat16),
        ("none", (0, 4), torch.float32),
        ("half", (3,), torch.float16),
        ("scalar", (), torch.float32),
        ("bytes", (1, 3), torch.uint8),
        ("stack", (2, 1, 2), torch.bfloat16),
        ("long", (1,), torch.int64),
        ("last", (0,), torch.uint8),
    ]
    layout = BucketLayout(tuple(TensorSpec(name, shape, dtype, (name,)) for name, shape, dtype in planned))
    whole = torch.arange(start + layout.num_bytes + 5, dtype=torch.uint8).to(device)
    views, offset = layout.views(whole[start:]), start
    assert list(views) == ["long", "none", "scalar", "matrix", "half", "stack", "bytes", "last"]
    for name, view in views.items():
        shape, dtype = next(rest for other, *rest in planned if other == name)
        assert (tuple(view.shape), view.dtype, view.is_contiguous()) == (shape, dtype, True)
        assert view.untyped_storage()._cdata == whole.untyped_storage()._cdata
        end = offset + view.nbytes
        assert view.storage_offset() * view.itemsize == offset
        if device == "cpu":
            assert view.flatten().view(torch.uint8).tolist() == list(range(offset, end))
        offset = end
    assert offset == start + layout.num_bytes == start + 41
