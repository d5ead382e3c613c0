"""Shapes of a policy against a plain single-process model with torch's AdamW. `table.py` has all of them.

Tolerances: in float32, 1e-5 on loss, gradient norm (relative), log-probs and every weight. With bf16 compute the
reference runs a bf16 copy of its float32 weights and is itself rounded at 8 bits, in another order: loss and norm within
2 %, the change of the weights since the start within 10 % over the model and 25 % in each tensor (relative L2 norm; Adam
turns the rounding of a small gradient into a large part of its step, and a norm of 16 elements has little to average it).
"""

import policy_cases as cases
import pytest
import torch
from comparison import compare
from plain import Plain, saved, train_plain
from ranks import Run, Seen, spawn, train_run
from shapes import FAMILIES, SHAPES, Shape
from transformers import AutoModelForCausalLM

BF16 = [Shape("bf16, one rank", 1, precision="bfloat16"), Shape("bf16 x2", 2, precision="bfloat16")]
UNTIED = Shape("untied head, one rank", 1, family="Qwen3, untied", micro_batch=3)
BOTH = "activation checkpointing, torch.compile x2"
CI_SHAPES = [shape for shape in SHAPES if shape.name != "torch.compile x2"]
RUN_SHAPES = {shape.name: shape for shape in (*CI_SHAPES, UNTIED, *BF16)}
SHARED = [name for name, shape in RUN_SHAPES.items() if shape.num_data_ranks < shape.num_ranks]
EXACT = [name for name, shape in RUN_SHAPES.items() if shape.precision == "float32"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Name of the shape -> its run; one checkpoint for all shapes of a family."""
    root = tmp_path_factory.mktemp("parity")
    folders = {
        name: cases.write_model(root / name, FAMILIES[name].make_config())
        for name in sorted({shape.family for shape in RUN_SHAPES.values()})
    }
    return {
        name: Run(shape, folders[shape.family], cases.free_port(), compile_backend="aot_eager")
        for name, shape in RUN_SHAPES.items()
    }


@pytest.fixture(scope="module")
def spawned(runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Seen]]]:
    """By number of ranks and rank; one spawn each serves every test of the file. `broken`: the error of a checkpoint that
    is not there.
    """
    out = tmp_path_factory.mktemp("ranks")
    broken = Run(Shape("broken"), str(out / "nothing_here"), cases.free_port())
    return {
        count: spawn(
            [run for run in runs.values() if run.shape.num_ranks == count],
            out / f"x{count}",
            broken if count == 2 else None,
        )
        for count in (2, 4)
    }


@pytest.fixture(scope="module")
def seen(runs: dict[str, Run], spawned: dict[int, list[dict[str, Seen]]]) -> dict[str, list[Seen]]:
    """Name of the shape -> what each of its ranks saw."""
    one = {name: [train_run(run, 0)] for name, run in runs.items() if run.shape.num_ranks == 1}
    return one | {
        name: [rank[name] for rank in spawned[run.shape.num_ranks]] for name, run in runs.items() if name not in one
    }


@pytest.fixture(scope="module")
def plain(runs: dict[str, Run]) -> dict[str, Plain]:
    return {name: train_plain(run.folder, run.shape) for name, run in runs.items()}


@pytest.mark.parametrize("name", EXACT)
def test_three_steps_equal_the_plain_model(name: str, seen: dict[str, list[Seen]], plain: dict[str, Plain]) -> None:
    assert min(plain[name].grad_norms) > cases.MAX_GRAD_NORM
    comparison = compare(seen[name], plain[name], RUN_SHAPES[name])
    assert comparison.num_tensors > 20
    assert comparison.is_equal, comparison
    for rank in seen[name]:
        assert [result.lr for result in rank.results] == pytest.approx(plain[name].lrs)


@pytest.mark.parametrize("name", [shape.name for shape in BF16])
def test_three_steps_in_bf16_are_near_the_plain_model(
    name: str, seen: dict[str, list[Seen]], plain: dict[str, Plain]
) -> None:
    expected = plain[name]
    for rank in seen[name]:
        assert [result.loss for result in rank.results] == pytest.approx(expected.losses, rel=2e-2, abs=2e-2)
        assert [result.grad_norm for result in rank.results] == pytest.approx(expected.grad_norms, rel=2e-2)
    weights = seen[name][0].weights
    off = {key: (value - expected.weights[key]).norm() for key, value in weights.items()}
    moved = {key: (expected.weights[key] - expected.start[key]).norm() for key in weights}
    assert sum(x**2 for x in off.values()) ** 0.5 < 0.1 * sum(x**2 for x in moved.values()) ** 0.5
    assert max(off[key] / moved[key] for key in weights) < 0.25


@pytest.mark.parametrize("name", [name for name, shape in RUN_SHAPES.items() if shape.num_ranks > 1])
def test_ranks_agree_exactly(name: str, seen: dict[str, list[Seen]]) -> None:
    first, *others = seen[name]
    for other in others:
        assert first.results == other.results
        assert list(first.weights) == list(other.weights)
        for key, tensor in other.weights.items():
            assert tensor.is_meta, "only rank 0 gathers"
            assert (tensor.shape, tensor.dtype) == (first.weights[key].shape, first.weights[key].dtype)


@pytest.mark.parametrize("name", SHARED)
def test_ranks_that_share_matrices_keep_equal_copies_of_the_rest(name: str, seen: dict[str, list[Seen]]) -> None:
    for first, second in zip(seen[name][::2], seen[name][1::2], strict=True):
        assert first.num_divided == second.num_divided > 10
        assert any(key.endswith("norm.weight") for key in first.replicas)
        assert first.replicas.keys() == second.replicas.keys()
        assert all(torch.equal(first.replicas[key], second.replicas[key]) for key in first.replicas)


def test_the_mean_logprob_is_that_of_the_global_batch(seen: dict[str, list[Seen]]) -> None:
    one, two = seen["one rank"][0].results, seen["FSDP2 x2"][0].results
    assert [r.metrics["mean_logprob"] for r in two] == pytest.approx([r.metrics["mean_logprob"] for r in one], rel=1e-5)


def test_the_auxiliary_loss_is_reported_where_the_model_has_it(seen: dict[str, list[Seen]]) -> None:
    for name, shape in RUN_SHAPES.items():
        for result in seen[name][0].results:
            assert ("aux_loss" in result.metrics) == (shape.family == "Qwen3-MoE, aux")
            # 2 experts of 4 per token: 2 when they are all used alike, 4 when two alone are.
            assert 1.9 < result.metrics.get("aux_loss", 2.0) < 4.0


def test_the_tie_survives_sharding_and_training(seen: dict[str, list[Seen]]) -> None:
    for name, shape in RUN_SHAPES.items():
        is_tied = shape.family in ("Qwen3", "Llama")
        for rank in seen[name]:
            assert rank.is_tied == is_tied
            assert ("lm_head.weight" in rank.weights) != is_tied


def test_rotary_buffers_are_right_on_every_rank(seen: dict[str, list[Seen]], runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        rotary = AutoModelForCausalLM.from_pretrained(run.folder).get_buffer("model.rotary_emb.inv_freq")
        assert all(torch.equal(rank.inv_freq, rotary) for rank in seen[name])


@pytest.mark.parametrize("name", RUN_SHAPES)
def test_the_reference_policy_stays_and_logprobs_follow_the_training(name: str, seen: dict[str, list[Seen]]) -> None:
    for rank in seen[name]:
        torch.testing.assert_close(rank.reference, rank.before, rtol=1e-6, atol=1e-6)
        assert (rank.after - rank.before).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["activation checkpointing x2", BOTH])
def test_checkpointed_blocks_are_wrapped_but_names_are_clean(name: str, seen: dict[str, list[Seen]]) -> None:
    for rank in seen[name]:
        assert any("_checkpoint_wrapped_module" in name for name in rank.module_names)
        assert list(rank.weights) == list(seen["FSDP2 x2"][0].weights)


@pytest.mark.parametrize("name", RUN_SHAPES)
def test_a_gradient_that_is_not_finite_stops_every_rank_before_the_step(name: str, seen: dict[str, list[Seen]]) -> None:
    assert all(rank.is_bad_step_refused for rank in seen[name])


def test_an_unreadable_checkpoint_raises_on_every_rank(spawned: dict[int, list[dict[str, Seen]]]) -> None:
    for rank in spawned[2]:
        assert "policy.model_name: cannot load" in rank["broken"]
        assert "nothing_here" in rank["broken"]


@pytest.mark.parametrize("name", RUN_SHAPES)
def test_the_exported_folder_loads_with_the_trained_weights(
    name: str, seen: dict[str, list[Seen]], runs: dict[str, Run]
) -> None:
    dtype = torch.bfloat16 if RUN_SHAPES[name].precision == "bfloat16" else torch.float32
    model, info = AutoModelForCausalLM.from_pretrained(runs[name].export_folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == dtype
    assert model.config.architectures == [type(model).__name__]
    for key, value in saved(model).items():
        assert torch.equal(value, seen[name][0].weights[key].to(dtype)), key
