"""What a refit may take beyond the shards, as the benchmark and the GPU tests hold it against what it took."""

import torch
from measuring import bound_bytes

from nemo_rl.distributed.weight_transfer.buckets import bucket_layouts
from nemo_rl.distributed.weight_transfer.manifest import Manifest, TensorSpec


def manifest(*num_bytes: int) -> Manifest:
    """Of tensors of these sizes, each of a layer of its own."""
    return Manifest(
        tuple(TensorSpec(f"w{i}.0.x", (size // 2,), torch.bfloat16, (f"w{i}",)) for i, size in enumerate(num_bytes))
    )


def test_rank_0_may_take_two_buckets_and_the_largest_tensor_others_one_bucket() -> None:
    layouts = bucket_layouts(manifest(40, 60, 40, 40, 60), 100)
    assert [layout.num_bytes for layout in layouts] == [100, 80, 60]
    assert [bound_bytes(layouts, rank) for rank in range(3)] == [260, 100, 100]


def test_a_model_of_one_bucket_has_one_buffer() -> None:
    layouts = bucket_layouts(manifest(40, 60), 1000)
    assert [bound_bytes(layouts, rank) for rank in range(2)] == [160, 100]


def test_a_tensor_larger_than_a_bucket_counts_as_one() -> None:
    layouts = bucket_layouts(manifest(40, 200), 100)
    assert [bound_bytes(layouts, rank) for rank in range(2)] == [600, 200]
