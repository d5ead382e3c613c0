"""Where buckets may end, and what counts as sent."""

import pytest
import torch

from nemo_rl.distributed.weight_transfer.errors import ManifestError
from nemo_rl.distributed.weight_transfer.manifest import Manifest, TensorSpec

ATTENTION = ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]


def manifest(*named: tuple[str, int], dtype: torch.dtype = torch.bfloat16) -> Manifest:
    return Manifest(tuple(TensorSpec(name, (size,), dtype, (name,)) for name, size in named))


def layers(num: int, *tensors: tuple[str, int]) -> Manifest:
    return manifest(*[(f"model.layers.{i}.{name}.weight", size) for i in range(num) for name, size in tensors])


def test_buckets_are_full_but_not_over() -> None:
    assert manifest(("a", 4), ("b", 4), ("c", 4), ("d", 2)).bucket_lengths(16) == [2, 2]


def test_edges_are_those_of_the_size_that_is_asked_for() -> None:
    planned = manifest(("a", 4), ("b", 4), ("c", 4), ("d", 2))
    lengths = {16: [2, 2], 8: [1, 1, 1, 1], 24: [3, 1]}
    for size in (16, 8, 24, 8, 16):
        assert planned.bucket_lengths(size) == lengths[size]
    assert (planned.largest_bytes, Manifest(()).largest_bytes) == (8, 0)


def test_a_tensor_larger_than_the_buffer_travels_alone() -> None:
    assert manifest(("a", 1), ("b", 100), ("c", 1)).bucket_lengths(8) == [1, 1, 1]


def test_edges_depend_on_wire_size() -> None:
    assert manifest(("a", 4), ("b", 4), dtype=torch.float32).bucket_lengths(16) == [1, 1]
    assert manifest(("a", 4), ("b", 4), dtype=torch.bfloat16).bucket_lengths(16) == [2]


def test_nothing_planned_nothing_sent() -> None:
    assert Manifest(()).bucket_lengths(8) == []


def test_a_layer_that_fits_is_not_split() -> None:
    # 3 tensors of 8 bytes per layer; one layer and a half would fit.
    assert layers(3, ("q", 4), ("k", 4), ("v", 4)).bucket_lengths(36) == [3, 3, 3]
    assert layers(3, ("q", 4), ("k", 4), ("v", 4)).bucket_lengths(48) == [6, 3]


def test_layers_ten_and_one_are_different_layers() -> None:
    specs = [("model.layers.1.q.weight", 4), ("model.layers.10.q.weight", 4), ("model.norm.weight", 4)]
    assert manifest(*specs).bucket_lengths(8) == [1, 1, 1]


def test_a_layer_that_does_not_fit_is_split_between_tensors() -> None:
    assert layers(1, ("q", 4), ("k", 4), ("v", 4)).bucket_lengths(16) == [2, 1]


@pytest.mark.parametrize("prefix", ["self_attn.", "attention.", "mixer."])
def test_what_the_engine_joins_stays_in_one_bucket_however_small(prefix: str) -> None:
    tensors = [(prefix + name, 4) for name in ATTENTION]
    assert layers(2, *tensors).bucket_lengths(1) == [4, 1, 4, 1]


@pytest.mark.parametrize(
    ("names", "lengths"),
    [
        (["attn.wq_a", "attn.q_norm", "attn.wkv", "attn.wo_b"], [3, 1]),
        (["attn.compressor.wgate", "attn.compressor.ape", "attn.compressor.wkv", "attn.wkv"], [3, 1]),
        (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], [1, 1, 1]),
    ],
)
def test_joins_of_other_families(names: list[str], lengths: list[int]) -> None:
    assert layers(2, *[(name, 4) for name in names]).bucket_lengths(1) == lengths * 2


def test_vision_attention_that_the_engine_joins() -> None:
    prefix = "vision_tower.vision_model.encoder.layers.{}.self_attn.{}_proj.weight"
    assert manifest(*[(prefix.format(i, part), 4) for i in range(2) for part in "kvq"]).bucket_lengths(1) == [3, 3]


def test_joined_tensors_of_two_layers_are_two_joins() -> None:
    names = [f"model.layers.{i}.self_attn.{name}.weight" for i in range(2) for name in (ATTENTION[0], ATTENTION[3])]
    assert manifest(*[(name, 4) for name in names]).bucket_lengths(1) == [2, 2]


def test_the_sum_of_lengths_is_the_number_of_tensors_for_any_size() -> None:
    planned = layers(5, *[(f"self_attn.{name}", 3 + i) for i, name in enumerate(ATTENTION)])
    for size in (1, 7, 20, 50, 64, 200, 10_000):
        assert sum(planned.bucket_lengths(size)) == 25


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("b", torch.zeros(4, dtype=torch.bfloat16), "b was to be sent; the manifest does not hold it"),
        ("a", torch.zeros(5, dtype=torch.bfloat16), r"a was to be sent as \[5\] torch.bfloat16; .* a \[4\] bfloat16"),
        ("a", torch.zeros(2, 2, dtype=torch.bfloat16), r"a was to be sent as \[2, 2\]"),
        ("a", torch.zeros(4), r"a was to be sent as \[4\] torch.float32"),
    ],
)
def test_a_tensor_that_was_not_planned_is_refused_by_name(name: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        manifest(("a", 4)).check(name, tensor)


def test_everything_planned_must_have_been_sent_once() -> None:
    planned = manifest(("a", 4), ("b", 4))
    planned.check("a", torch.zeros(4, dtype=torch.bfloat16))
    planned.check_complete(["b", "a"])
    with pytest.raises(ManifestError, match="1 tensors of the manifest were not sent: b"):
        planned.check_complete(["a"])
    with pytest.raises(ManifestError, match="1 tensors were sent more than once: a"):
        planned.check_complete(["a", "b", "a"])
