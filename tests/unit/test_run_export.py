"""What a run writes at its end, with and without LoRA."""

from pathlib import Path

import pytest

from nemo_rl.config.loader import load_config
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.run import export_trained
from nemo_rl.utils.metrics import MetricsLogger
from nemo_rl.utils.run_folder import RunFolder

TINY = Path(__file__).parents[2] / "examples/configs/grpo_tiny_cpu.yaml"
LORA = "policy.dtensor_cfg.lora_cfg.enabled=true"


class Exports(Policy):
    """Records what it is asked to write."""

    def __init__(self, asked: list[tuple[str, str]]) -> None:
        self._asked = asked

    def export_hf(self, folder: str) -> None:
        self._asked.append(("model", folder))

    def export_adapter(self, folder: str) -> None:
        self._asked.append(("adapter", folder))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], [("model", "{run}/hf_model")]),
        ([LORA], [("model", "{run}/hf_model"), ("adapter", "{run}/hf_model_adapter")]),
        ([LORA, "checkpointing.lora_export=merged"], [("model", "{run}/hf_model")]),
        (
            [LORA, "checkpointing.lora_export=adapter", "checkpointing.checkpoint_dir=/out/mine"],
            [("adapter", "/out/mine_adapter")],
        ),
    ],
)
def test_the_model_and_the_adapter_lie_beside_each_other(
    overrides: list[str], expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    asked: list[tuple[str, str]] = []
    with MetricsLogger(tmp_path, num_steps=1, tensorboard=False) as metrics:
        export_trained(load_config(TINY, overrides), Exports(asked), RunFolder(tmp_path), metrics)
    assert asked == [(what, folder.format(run=tmp_path)) for what, folder in expected]
