"""What a refit may take beyond the shards, as the benchmark and the GPU tests hold it against what it took."""

from typing import Any

import torch
from measuring import bound_bytes
from transformers.core_model_loading import Chunk, WeightConverter

from nemo_rl.distributed.weight_transfer.manifest import Manifest, TensorSpec
from nemo_rl.models.policy.conversions import TensorGroup
from nemo_rl.models.policy.export_plan import ExportPlan, LowRankUpdate

NO_TWIN: Any = None


def plan(*num_bytes: int, **fields: Any) -> ExportPlan:
    """Of tensors of these sizes, each of a layer of its own."""
    specs = [TensorSpec(f"w{i}.0.x", (size // 2,), torch.bfloat16, (f"w{i}",)) for i, size in enumerate(num_bytes)]
    groups = [TensorGroup(spec.sources, (), spec.name, None) for spec in specs]
    return ExportPlan(Manifest(tuple(specs)), tuple(groups), NO_TWIN, **fields)


def with_experts(made_bytes: int, num_experts: int, *num_bytes: int) -> ExportPlan:
    """A last group is a stack that becomes so many tensors."""
    dense, shape = plan(*num_bytes), (made_bytes // num_experts // 2,)
    made = [TensorSpec(f"e.0.{i}.x", shape, torch.bfloat16, ("stack",)) for i in range(num_experts)]
    split = WeightConverter("stack", "e.0.*.x", operations=[Chunk(dim=0)])
    group = TensorGroup(("stack",), ("stack",), "e.0.0.x", split)
    return ExportPlan(Manifest((*dense.manifest.specs, *made)), (*dense.groups, group), NO_TWIN)


def bounds(made: ExportPlan, bucket_bytes: int, num_ranks: int = 2) -> list[int]:
    return [bound_bytes(made, bucket_bytes, rank) for rank in range(num_ranks)]


def test_rank_0_may_take_two_buckets_and_the_largest_tensor_others_one_bucket() -> None:
    assert bounds(plan(40, 60, 40, 40, 60), 100, num_ranks=3) == [260, 100, 100]


def test_a_model_of_one_bucket_has_one_buffer() -> None:
    assert bounds(plan(40, 60), 1000) == [160, 100]


def test_a_tensor_larger_than_a_bucket_counts_as_one() -> None:
    assert bounds(plan(40, 200), 100) == [600, 200]


def test_what_is_converted_and_what_is_made_of_it_count() -> None:
    larger, smaller = with_experts(80, 4, 40, 40), with_experts(16, 4, 40, 40)
    assert bounds(larger, 100) == [2 * 80 + 40 + 80 + 80, 80]
    assert bounds(smaller, 100) == [96 + 40 + 40 + 16, 96]


def test_a_weight_with_an_adapter_takes_eight_bytes_per_element() -> None:
    adapted = plan(40, 60, updates={"w1": LowRankUpdate("a", "b", 1.0)})
    assert bounds(adapted, 1000) == [100 + 60 + 240 + 240, 100]
