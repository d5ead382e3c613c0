"""Training with pictures, FSDP2 at 1 and 2 ranks, of which one alone has pictures, against a plain single process.

The tower is trained, or frozen and with activation checkpointing. Float32; loss, gradient norm (relative) and every weight after three steps within 1e-5.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import policy_cases as cases
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from vision_cases import VisionCase, make_picture_batch, train_vision_case, vision_rank_main

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.model_source import resolve_model
from nemo_rl.models.policy.train_step import compute_logprobs
from nemo_rl.models.policy.vision import GRIDS, PIXELS, check_vision_tower

CASES = ("trained", "frozen")
TOWER = "model.visual."


@dataclass(frozen=True)
class PlainVision:
    losses: list[float]
    grad_norms: list[float]
    logprobs: torch.Tensor
    """`[batch, seq]` before training, on response tokens of the first batch."""
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("tiny-random-qwen3-vl", tmp_path_factory.mktemp("cache"))


def chosen_logprobs(model: Any, batch: BatchedDataDict) -> torch.Tensor:
    """`[batch, seq - 1]`, the whole batch in one forward pass, with an attention mask."""
    ids = batch["input_ids"]
    logits = model(
        input_ids=ids,
        attention_mask=(torch.arange(ids.shape[1]) < batch["input_lengths"][:, None]).long(),
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        **{name: torch.cat([one[name] for one in batch["multimodal"] if one]) for name in (PIXELS, GRIDS)},
    ).logits
    return (logits / cases.TEMPERATURE)[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)


def train_plain_vision(folder: Path, *, frozen: bool) -> PlainVision:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    model.model.visual.requires_grad_(not frozen)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    betas = (cases.ADAMW["betas"][0], cases.ADAMW["betas"][1])
    optimizer = torch.optim.AdamW(trained, **{**cases.ADAMW, "betas": betas}, foreach=False)
    losses, norms, logprobs = [], [], torch.empty(0)
    for step in range(cases.NUM_STEPS):
        optimizer.param_groups[0]["lr"] = cases.ADAMW["lr"] * min(1.0, 0.5 + 0.5 * step / 2)
        batch = make_picture_batch(step, model.config)
        optimizer.zero_grad()
        mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
        chosen = chosen_logprobs(model, batch)
        if step == 0:
            logprobs = torch.nn.functional.pad((chosen * mask).detach(), (1, 0))
        loss = -(chosen * batch["weights"][:, None] * mask).sum() / mask.sum()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, cases.MAX_GRAD_NORM).item())
        optimizer.step()
        losses.append(loss.item())
    return PlainVision(losses, norms, logprobs, {name: weight.detach() for name, weight in model.named_parameters()})


@pytest.fixture(scope="module")
def plain_runs(vision_folder: Path) -> dict[str, PlainVision]:
    return {name: train_plain_vision(vision_folder, frozen=name == "frozen") for name in CASES}


@pytest.fixture(scope="module")
def vision_runs(vision_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """World size -> per rank: case name -> what the rank saw."""
    out = tmp_path_factory.mktemp("ranks")

    def listed() -> list[VisionCase]:
        return [VisionCase(name, str(vision_folder), cases.free_port(), name == "frozen") for name in CASES]

    torch.multiprocessing.spawn(vision_rank_main, (2, listed(), str(out)), nprocs=2)
    two = [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    return {1: [{case.name: train_vision_case(case, 0, 1) for case in listed()}], 2: two}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_three_steps_with_pictures_equal_the_plain_model(
    name: str, world_size: int, vision_runs: dict[int, list[dict[str, Any]]], plain_runs: dict[str, PlainVision]
) -> None:
    expected = plain_runs[name]
    assert min(expected.grad_norms) > cases.MAX_GRAD_NORM
    for ranks in vision_runs[world_size]:
        assert [r.loss for r in ranks[name]["results"]] == pytest.approx(expected.losses, rel=1e-5, abs=1e-5)
        assert [r.grad_norm for r in ranks[name]["results"]] == pytest.approx(expected.grad_norms, rel=1e-5)
    before = torch.cat([ranks[name]["before"] for ranks in vision_runs[world_size]])
    torch.testing.assert_close(before, expected.logprobs, rtol=1e-5, atol=1e-5)
    weights = vision_runs[world_size][0][name]["weights"]
    assert weights.keys() == expected.weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(
            value, expected.weights[key], rtol=1e-5, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}"
        )


def test_both_ranks_gather_in_one_order_though_one_has_no_picture(vision_runs: dict[int, list[dict[str, Any]]]) -> None:
    first, second = (ranks["trained"]["gathers"] for ranks in vision_runs[2])
    assert first == second
    blocks = [f"model.{part}.{index}" for part in ("visual.blocks", "language_model.layers") for index in range(2)]
    assert first[:5] == ["", *blocks]
    assert len(first) == 5 * 2 * (cases.NUM_STEPS + 1)  # two micro-batches each time


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_frozen_tower_stays_bit_for_bit_and_all_else_moves(
    world_size: int, vision_runs: dict[int, list[dict[str, Any]]], vision_folder: Path
) -> None:
    start = AutoModelForImageTextToText.from_pretrained(vision_folder, dtype=torch.float32).state_dict()
    seen = vision_runs[world_size][0]["frozen"]
    for key, value in seen["weights"].items():
        assert torch.equal(value, start[key]) == key.startswith(TOWER), key
    trained = vision_runs[world_size][0]["trained"]
    assert not [key for key, value in trained["weights"].items() if torch.equal(value, start[key])]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_optimizer_holds_what_is_trained_and_the_refit_knows_what_is_not(
    world_size: int, vision_runs: dict[int, list[dict[str, Any]]]
) -> None:
    for ranks in vision_runs[world_size]:
        seen = ranks["frozen"]
        assert seen["frozen_names"] == {name for name in seen["weights"] if name.startswith(TOWER)}
        assert len(seen["frozen_names"]) == seen["num_of_tower"] > 30
        assert seen["num_optimized"] == seen["num_parameters"] - seen["num_of_tower"]
        assert ranks["trained"]["frozen_names"] == set()
        assert ranks["trained"]["num_optimized"] == seen["num_parameters"]


def test_in_bfloat16_log_probs_are_those_of_the_plain_model_bit_for_bit(vision_folder: Path) -> None:
    cfg = cases.policy_config(precision="bfloat16")
    worker = cases.make_worker(str(vision_folder), cfg, rank=0, world_size=1, port=cases.free_port())
    batch = make_picture_batch(0, worker.model.config)
    policy = worker.get_logprobs(batch)["logprobs"]
    reference = worker.get_reference_policy_logprobs(batch)["reference_logprobs"]
    worker.shutdown()
    plain = AutoModelForImageTextToText.from_pretrained(
        vision_folder, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    expected = compute_logprobs(plain, batch, micro_batch_size=2, temperature=cases.TEMPERATURE)
    assert torch.equal(policy, expected)
    assert torch.equal(reference, expected)


def test_a_text_model_has_no_tower_to_freeze(tmp_path: Path, vision_folder: Path) -> None:
    text = resolve_model("tiny-random-qwen3", tmp_path)
    with pytest.raises(
        ValueError, match=r"policy\.freeze_vision_tower: got true; Qwen3ForCausalLM has no vision tower"
    ):
        check_vision_tower(text)
    check_vision_tower(vision_folder)


def test_columns_of_tensor_mappings_survive_every_operation_of_a_batch(vision_folder: Path) -> None:
    batch = make_picture_batch(0, AutoConfig.from_pretrained(vision_folder))

    def heights(data: BatchedDataDict) -> list[list[int]]:
        return [one[GRIDS][:, 1].tolist() if one else [] for one in data["multimodal"]]

    all_of_them = [[4], [], [2, 4], [2], [], [], [], []]
    assert heights(batch) == all_of_them
    assert heights(batch.select_indices([2, 0, 1])) == [[2, 4], [4], []]
    assert heights(batch.repeat_interleave(2)) == [one for one in all_of_them for _ in range(2)]
    for parts in (batch.shard_by_batch_size(2), list(batch.make_microbatch_iterator(3))):
        assert heights(BatchedDataDict.from_batches(parts)) == all_of_them
    moved = batch.to("meta")
    assert moved["multimodal"][0][PIXELS].is_meta
    assert moved["multimodal"][1] == {}
    assert not batch["multimodal"][0][PIXELS].is_meta
