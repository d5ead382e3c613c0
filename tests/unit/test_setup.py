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
LORA = "policy.dtensor_cfg.lora_cfg"
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
        (["data.dataset_name=pictures"], "policy.model_name: "),
        (["policy.tokenizer.chat_template='{{ nothing }}'"], "policy.tokenizer.chat_template: "),
        (
            ["policy.freeze_vision_tower=true"],
            "policy.freeze_vision_tower: got true; Qwen3ForCausalLM has no vision tower",
        ),
        (["checkpointing.checkpoint_dir=/proc/model"], "checkpointing.checkpoint_dir: got '/proc/model'; "),
        (
            [f"{LORA}.enabled=true", f"{LORA}.match_all_linear=false", f"{LORA}.target_modules=[q_proj,qkv]"],
            f"{LORA}.target_modules: got 'qkv', which no linear layer is called; allowed: down_proj, gate_proj, ",
        ),
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
            ["cluster.device=auto", "policy.dtensor_cfg.cpu_offload=true"],
            "policy.dtensor_cfg.cpu_offload: got true; allowed on cuda, and this run is on cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this run would be on cuda"),
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


@pytest.mark.parametrize(("variable", "value"), [("CXX", "/no/such/compiler -O1"), ("PATH", "/no/such/folder")])
def test_compiling_without_a_compiler_is_refused_before_anything_is_started(
    variable: str, value: str, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(TINY, ["policy.dtensor_cfg.torch_compile=true"])
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=r"policy.dtensor_cfg.torch_compile: got true; .* on cpu one of .*PATH"):
        setup.prepare_inputs(config)
    assert started == []
