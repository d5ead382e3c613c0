"""Refits of one worker between training steps, at 2 ranks, against a plain model in one process."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import policy_cases as cases
import pytest
import torch
from lora_cases import BUCKET_BYTES, Refits, whole
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2

CONFIGS = {"dense": cases.dense_config(tied=True), "moe": cases.moe_config()}
VOCAB = 64
NUM_REFITS = 4
"""Before the first step and after each."""


def rank_main(rank: int, folder: str, ports: dict[str, int]) -> None:
    torch.set_num_threads(1)
    for name, port in ports.items():
        cfg = cases.policy_config(dtensor={"activation_checkpointing": name == "dense"})
        worker = cases.make_worker(f"{folder}/{name}", cfg, rank=rank, world_size=2, port=port)
        torch.save(run(worker, rank), f"{folder}/{name}-rank{rank}.pt")
        worker.shutdown()


def run(worker: DTensorPolicyWorkerV2, rank: int) -> dict[str, Any]:
    refits, payloads, states = Refits(worker, rank), [], []
    for step in range(NUM_REFITS):
        payloads.append(refits.next())
        states.append(worker._state)
        part = cases.make_batch(step, vocab=VOCAB).shard_by_batch_size(2)[rank]
        worker.get_logprobs(part)
        worker.train(part, cases.WeightedLoss())
    norm: Any = worker.model.model.norm
    norm.requires_grad_(False)
    value = whole(norm.weight)  # moved since the last refit
    frozen = {"value": value, "payloads": [refits.next(), refits.next()]}
    norm.requires_grad_(True)
    worker.train(part, cases.WeightedLoss())
    norm.requires_grad_(False)
    frozen["payloads"].append(refits.next())
    norm.weight = torch.nn.Parameter(norm.weight.detach() + 1, requires_grad=False)
    frozen["payloads"].append(refits.next())
    norm.scale = norm.weight
    del norm.weight
    errors = []
    for prepares in (True, False):
        if prepares:
            worker.prepare_weight_update(ticket="late", buffer_size_bytes=BUCKET_BYTES)
        with pytest.raises(TransferError) as error:
            refits.next(ticket="late")
        errors.append(error.value.what)
        refits = Refits(worker, rank)
    worker.disconnect_sglang_rollout_engines_distributed()
    num_states = len({id(state) for state in states})
    return {"payloads": payloads, "num_states": num_states, "errors": errors, "frozen": frozen}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refits")
    for name, config in CONFIGS.items():
        cases.write_model(folder / name, config)
    torch.multiprocessing.spawn(rank_main, (str(folder), {name: cases.free_port() for name in CONFIGS}), nprocs=2)
    return folder


def seen(folder: Path, name: str, rank: int) -> dict[str, Any]:
    return torch.load(folder / f"{name}-rank{rank}.pt", weights_only=False)


def plain_payloads(folder: Path, name: str) -> list[dict[str, torch.Tensor]]:
    """What `save_pretrained` writes before the first step and after each."""
    model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
    betas = (cases.ADAMW["betas"][0], cases.ADAMW["betas"][1])
    optimizer = torch.optim.AdamW(model.parameters(), **{**cases.ADAMW, "betas": betas}, foreach=False)
    payloads = []
    for step in range(NUM_REFITS):
        model.save_pretrained(folder / f"{name}-plain-{step}")
        payloads.append(load_file(folder / f"{name}-plain-{step}/model.safetensors"))
        factor = min(1.0, 0.5 + 0.5 * step / cases.WARM_UP["total_iters"])
        optimizer.param_groups[0]["lr"] = cases.ADAMW["lr"] * factor
        optimizer.zero_grad()
        cases.plain_loss(model, cases.make_batch(step, vocab=VOCAB)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cases.MAX_GRAD_NORM)
        optimizer.step()
    return payloads


@pytest.mark.parametrize("name", CONFIGS)
def test_every_refit_of_a_worker_sends_what_a_plain_model_holds_by_then(name: str, folder: Path) -> None:
    got, expected = seen(folder, name, 0)["payloads"], plain_payloads(folder, name)
    for payload, plain in zip(got, expected, strict=True):
        assert payload.keys() == plain.keys()
        for key, value in plain.items():
            torch.testing.assert_close(payload[key], value, rtol=1e-5, atol=1e-5, msg=key)
    assert all(torch.equal(got[0][key], value) for key, value in expected[0].items())
    for before, after in pairwise(got):
        assert sum(not torch.equal(before[key], after[key]) for key in before) > len(before) / 2


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_and_training_leave_the_state_of_a_worker_current(name: str, folder: Path) -> None:
    assert [seen(folder, name, rank)["num_states"] for rank in range(2)] == [1, 1]


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_frozen_after_a_step_or_replaced_travels_once_more(name: str, folder: Path) -> None:
    frozen = seen(folder, name, 0)["frozen"]
    moved, still, moved_again, replaced = (payload.get("model.norm.weight") for payload in frozen["payloads"])
    assert torch.equal(moved, frozen["value"])
    assert still is None
    assert not torch.equal(moved_again, moved)
    assert torch.equal(replaced, moved_again + 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_parameter_renamed_between_refits_fails_them_on_every_rank(name: str, folder: Path) -> None:
    for rank in range(2):
        errors = seen(folder, name, rank)["errors"]
        assert len(errors) == 2
        for error in errors:
            assert error.endswith("has changed since set-up: gone are model.norm.weight; new are model.norm.scale")
