"""Bucket edges and the flat layout, by exact values."""

import torch

from nemo_rl.distributed.weight_transfer.buckets import flatten_bucket, iter_named_tensor_buckets, make_header


def tensors(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> list[tuple[str, torch.Tensor]]:
    return [(f"t{i}", torch.full((size,), i, dtype=dtype)) for i, size in enumerate(sizes)]


def names(buckets: list[list[tuple[str, torch.Tensor]]]) -> list[list[str]]:
    return [[name for name, _ in bucket] for bucket in buckets]


def test_buckets_are_full_but_not_over_in_the_order_given() -> None:
    assert names(list(iter_named_tensor_buckets(tensors(4, 4, 4, 2), 16))) == [["t0", "t1"], ["t2", "t3"]]


def test_a_tensor_larger_than_the_buffer_travels_alone() -> None:
    assert names(list(iter_named_tensor_buckets(tensors(1, 100, 1), 8))) == [["t0"], ["t1"], ["t2"]]


def test_no_tensors_no_bucket() -> None:
    assert list(iter_named_tensor_buckets([], 8)) == []


def test_edges_depend_on_wire_size() -> None:
    assert len(list(iter_named_tensor_buckets(tensors(4, 4, dtype=torch.float32), 16))) == 2
    assert len(list(iter_named_tensor_buckets(tensors(4, 4, dtype=torch.bfloat16), 16))) == 1


def test_wider_dtypes_come_first_so_that_every_offset_is_aligned() -> None:
    mixed = [
        ("odd", torch.ones(3, dtype=torch.bfloat16)),
        ("wide", torch.ones(2)),
        ("byte", torch.ones(1, dtype=torch.uint8)),
    ]
    (bucket,) = iter_named_tensor_buckets(mixed, 1000)
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
