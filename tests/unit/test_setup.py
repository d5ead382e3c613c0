"""The second guard: a config that never went through the loader is refused before anything is started."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl import setup
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.layout import make_layout
from nemo_rl.config.loader import load_config, read_yaml
from nemo_rl.config.validation import validate
from nemo_rl.utils.metrics import MetricsLogger
from nemo_rl.utils.run_folder import RunFolder

TINY = Path(__file__).parents[2] / "examples/configs/grpo_tiny_cpu.yaml"
SERVER = "policy.generation.sglang_cfg.sglang_server_config"
UNSUPPORTED = [
    "policy.generation.backend=vllm",
    "policy.dtensor_cfg._v2=false",
    "policy.megatron_cfg.enabled=true",
    "policy.generation.colocated.enabled=true",
    f"{SERVER}.weight_transfer_mode=ipc",
    f"{SERVER}.pause_generation_mode=in_place",
    f"{SERVER}.pp_size=2",
    "policy.generation.sglang_cfg.quantization.scheme=fp8",
    "policy.generation.top_p=0.9",
    "policy.dtensor_cfg.context_parallel_size=2",
]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records what set-up starts: Ray, clusters, actors, servers all come after the first of these."""
    events: list[str] = []
    for name in ("start_ray", "RayVirtualCluster"):
        monkeypatch.setattr(setup, name, lambda *args, name=name, **kwargs: events.append(name))
    return events


@pytest.mark.parametrize("override", UNSUPPORTED)
def test_an_unsupported_setting_is_refused_before_anything_is_started(
    override: str, started: list[str], tmp_path: Path
) -> None:
    config = validate(read_yaml(TINY, [override]))
    nothing: Any = None
    inputs = setup.Inputs(make_layout(config), "cpu", tmp_path, nothing, nothing, nothing, nothing)
    metrics = MetricsLogger(tmp_path, num_steps=1, tensorboard=False)
    key, _, value = override.partition("=")
    with (
        pytest.raises(ConfigError, match=f"{key}: got .*{value}.*not supported .*; set "),
        setup.start_participants(config, inputs, RunFolder(tmp_path), metrics),
    ):
        pytest.fail("it was started")
    assert started == []


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["policy.model_name=/no/such/folder"], "policy.model_name: "),
        (["policy.tokenizer.chat_template='{{ nothing }}'"], "policy.tokenizer.chat_template: "),
        (["checkpointing.checkpoint_dir=/proc/model"], "checkpointing.checkpoint_dir: got '/proc/model'; "),
        (
            ["policy.dtensor_cfg.tensor_parallel_size=4", "cluster.gpus_per_node=5"],
            "policy.dtensor_cfg.tensor_parallel_size: got 4; must divide what Qwen3ForCausalLM has: num_key_value_heads = 2",
        ),
        (["policy.generation.stop_token_ids=[100]"], "policy.generation.stop_token_ids: got 100; allowed: 0 to 99"),
        (
            ["data.dataset_name=ResponseDataset", "data.train_data_path=/no/file", "data.val_data_path=/no/file"],
            "data.val_data_path: ",
        ),
        pytest.param(
            ["cluster.device=cuda"],
            "cluster.device: got 'cuda'; no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_what_the_config_names_is_looked_at_before_anything_is_started(
    overrides: list[str], line: str, started: list[str]
) -> None:
    config = load_config(TINY, overrides)
    with pytest.raises(ValueError, match=r": ") as caught:
        setup.prepare_inputs(config)
    assert str(caught.value).splitlines()[-1].startswith(line)
    assert started == []
