"""GRPO on a mixture of experts, with an auxiliary loss: what trainer and engine make of the same tokens."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "families"))
from family import Family, write_checkpoint
from text_families import TEXT_FAMILIES
from transformers import PretrainedConfig

from nemo_rl.algorithms.grpo import grpo_train
from nemo_rl.config.loader import load_config
from nemo_rl.setup import prepare_inputs, start_participants
from nemo_rl.utils.metrics import MetricsLogger
from nemo_rl.utils.run_folder import make_run_folder

(QWEN3_MOE,) = (family for family in TEXT_FAMILIES if family.name == "Qwen3-MoE")
CONFIG = Path(__file__).parents[2] / "examples/configs/grpo_tiny_cpu.yaml"
NUM_STEPS = 4


def make_config() -> PretrainedConfig:
    config = QWEN3_MOE.make_config()
    config.update({"output_router_logits": True, "router_aux_loss_coef": 0.01})
    return config


def train(family: Family, folder: Path, precision: str) -> list[dict[str, Any]]:
    """The metrics of every step."""
    write_checkpoint(family, folder / "model", seed=0)
    config = load_config(
        CONFIG,
        [
            f"policy.model_name={folder / 'model'}",
            f"policy.precision={precision}",
            f"grpo.max_num_steps={NUM_STEPS}",
            "grpo.val_period=0",
            "grpo.val_at_start=false",
            "grpo.val_at_end=false",
            "policy.optimizer.kwargs.lr=1e-3",
            f"logger.log_dir={folder / 'logs'}",
        ],
    )
    run_folder = make_run_folder(config.logger.log_dir)
    with (
        MetricsLogger(run_folder.path, num_steps=NUM_STEPS, tensorboard=False) as metrics,
        start_participants(config, prepare_inputs(config), run_folder, metrics) as participants,
    ):
        grpo_train(config, participants)
    return [json.loads(line) for line in (run_folder.path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("precision", ["bfloat16"])
def test_a_mixture_of_experts_stays_near_its_engine_while_it_trains(precision: str, tmp_path: Path) -> None:
    rows = train(replace(QWEN3_MOE, make_config=make_config), tmp_path, precision)
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    for row in rows:
        assert 1.0 <= row["train/token_mult_prob_error"] < 1.03
        # 2 experts of 4 per token: 2 when all are used alike.
        assert 1.9 < row["train/aux_loss"] < 4.0
        assert row["train/grad_norm"] > 0
        assert row["refit/weight_version"] == row["step"] + 1
