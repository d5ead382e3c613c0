"""GRPO on pictures with a real engine, which is then asked with and without them."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_process import ROOT
from transformers import AutoModelForImageTextToText, AutoProcessor

from nemo_rl.algorithms.grpo import Participants, grpo_train
from nemo_rl.config.loader import load_config
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.model_source import resolve_model
from nemo_rl.run import export_trained
from nemo_rl.setup import prepare_inputs, start_participants
from nemo_rl.utils.metrics import MetricsLogger
from nemo_rl.utils.run_folder import make_run_folder

PICTURES = ROOT / "examples/configs/grpo_vlm_sglang_broadcast_cpu.yaml"
NUM_STEPS = 3
NUM_ANSWERS = 100


@dataclass(frozen=True)
class PictureRun:
    """Three finished steps of two trainer ranks with a frozen tower and one engine, which still serve."""

    folder: Path
    participants: Participants

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def picture_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PictureRun]:
    log_dir = tmp_path_factory.mktemp("pictures")
    settings = [f"logger.log_dir={log_dir}", "policy.freeze_vision_tower=true", "refit.verify=full"]
    config = load_config(PICTURES, settings)
    folder, inputs = make_run_folder(config.logger.log_dir), prepare_inputs(config)
    with (
        MetricsLogger(folder.path, num_steps=NUM_STEPS, tensorboard=False) as metrics,
        start_participants(config, inputs, folder, metrics) as run,
    ):
        grpo_train(config, run)
        export_trained(config, run.policy, folder, metrics)
        yield PictureRun(folder.path, run)


def test_trainer_and_engine_see_the_same_picture_in_every_step(picture_run: PictureRun) -> None:
    rows = picture_run.rows
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["step"] for row in rows if "validation/accuracy" in row] == [0, 2, 3]
    for row in rows[1:]:
        assert 1.0 <= row["train/token_mult_prob_error"] < 1.03
        assert math.isfinite(row["train/loss"])
        assert 0 < row["train/grad_norm"] < math.inf
        assert row["refit/weight_version"] == row["step"] + 1


def test_a_frozen_tower_travels_once_and_leaves_the_run_as_it_came(picture_run: PictureRun) -> None:
    before, after = (
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (resolve_model("tiny-random-qwen3-vl"), picture_run.folder / "hf_model")
    )
    tower = {name for name in before if name.startswith("model.visual.")}
    assert {name for name in before if torch.equal(before[name], after[name])} == tower
    assert [row["refit/tensors"] for row in picture_run.rows[1:]] == [len(before) - len(tower)] * NUM_STEPS
    assert type(AutoProcessor.from_pretrained(picture_run.folder / "hf_model")).__name__ == "Qwen3VLProcessor"


def test_a_hundred_answers_with_and_a_hundred_without_a_picture_after_refits(picture_run: PictureRun) -> None:
    """`generate` raises at an error and at a log-prob that is not finite."""
    check_answers(picture_run.participants, with_picture(picture_run.participants))
    check_answers(picture_run.participants, without_picture(picture_run.participants))


def with_picture(run: Participants) -> BatchedDataDict:
    batches = [run.train_prompts.next_batch() for _ in range(math.ceil(NUM_ANSWERS / 8))]
    return BatchedDataDict.from_batches(batches).slice(0, NUM_ANSWERS)


def without_picture(run: Participants) -> BatchedDataDict:
    ids = torch.randint(4, 100, (NUM_ANSWERS, 24), generator=torch.Generator().manual_seed(0))
    nothing: list[Any] = [[] for _ in range(NUM_ANSWERS)]
    lengths = torch.full((NUM_ANSWERS,), 24)
    return BatchedDataDict(input_ids=ids, input_lengths=lengths, images=nothing, multimodal=[{} for _ in nothing])


def check_answers(run: Participants, prompts: BatchedDataDict) -> None:
    """All are there, of the refit's version, and the trainer gives each sampled token the same log-prob."""
    out = run.generation.generate(BatchedDataDict({k: prompts[k] for k in ("input_ids", "input_lengths", "images")}))
    assert out["weight_version"] == [str(run.synchronizer.version)] * NUM_ANSWERS
    sampled = out["logprobs"] != 0
    assert sampled.any(1).all()
    data = BatchedDataDict(
        input_ids=out["output_ids"],
        input_lengths=out["unpadded_sequence_lengths"],
        multimodal=prompts["multimodal"],
    )
    own = run.policy.get_logprobs(data)["logprobs"]
    assert (own - out["logprobs"])[sampled].abs().max() < 1e-3
