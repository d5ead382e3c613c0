"""The second guard: a config that never went through the loader is refused before anything is started."""

import json
import subprocess
import sys
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
        (
            ["data.dataset_name=pictures"],
            "policy.model_name: got 'tiny-random-qwen3', a qwen3, and the data has pictures; allowed with pictures: ",
        ),
        (
            ["policy.max_total_sequence_length=8", "policy.generation.max_new_tokens=4"],
            "policy.max_total_sequence_length: got 8; 0 of ",
        ),
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
            "data.train_data_path: ",
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


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_model_without_eyes_is_refused_before_a_picture_is_opened(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no picture")
    data = write_rows(tmp_path / "a.jsonl", {"input": "x", "output": "1", "image": "a.png"})
    files = ["data.dataset_name=ResponseDataset", f"data.train_data_path={data}", f"data.val_data_path={data}"]
    overrides = [*files, "data.image_key=image"]
    with pytest.raises(ValueError, match="^policy.model_name: got 'tiny-random-qwen3', a qwen3, and the data has pic"):
        setup.prepare_inputs(load_config(TINY, overrides))
    with pytest.raises(ValueError, match=r"a.jsonl, line 1: '.*a.png' is no picture that can be read"):
        setup.prepare_inputs(load_config(TINY, [*overrides, "policy.model_name=tiny-random-qwen3-vl"]))


@pytest.mark.parametrize(
    ("train", "validation", "says"),
    [
        ("xxxxx", "", "^policy.max_total_sequence_length: got 40; 1 of 9 training problems fit, and 8 must; the sh"),
        ("", "xxxxx", "^policy.max_total_sequence_length: got 40; 0 of 1 validation problems fit, and 1 must; the sh"),
        ("xxxxx", "xxxxx", "^policy.max_total_sequence_length: got 40; 1 of 9 training "),
    ],
)
def test_problems_that_are_too_long_are_told_by_the_length_that_they_need(
    train: str, validation: str, says: str, tmp_path: Path
) -> None:
    rows = [{"input": "1", "output": "1"}, *({"input": train * 8 or "2", "output": "1"} for _ in range(8))]
    files = (
        write_rows(tmp_path / "t.jsonl", *rows),
        write_rows(tmp_path / "v.jsonl", {"input": validation * 8 or "1", "output": "1"}),
    )
    overrides = ["data.dataset_name=ResponseDataset", "policy.max_total_sequence_length=40"]
    overrides += [f"data.train_data_path={files[0]}", f"data.val_data_path={files[1]}"]
    sizes = ["grpo.num_prompts_per_step=8", "policy.tokenizer.chat_template=null"]
    with pytest.raises(ValueError, match=says) as refused:
        setup.prepare_inputs(load_config(TINY, [*overrides, *sizes]))
    assert str(refused.value).endswith("need 41")


def test_no_problem_at_all_names_every_key_of_the_validation(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "t.jsonl", *[{"input": "1", "output": "1"}] * 64)
    (tmp_path / "v.jsonl").touch()
    overrides = [f"data.train_data_path={data}", f"data.val_data_path={tmp_path / 'v.jsonl'}"]
    with pytest.raises(ValueError, match="set grpo.val_period=0 grpo.val_at_start=false grpo.val_at_end=false$"):
        setup.prepare_inputs(load_config(TINY, ["data.dataset_name=ResponseDataset", *overrides]))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.train_data_path=/no/file", "data.train_data_path: cannot read '/no/file'"),
        ("data.output_key=answer", "line 1: no key 'answer' (data.output_key)"),
        ("data.image_key=pic", "data.image_key: got 'pic', which no line has; allowed: ['image', 'input', 'output']"),
        ("data.image_key=image", "line 1: 'image': no file "),
        ("policy.model_name=/no/folder", "policy.model_name: no folder '/no/folder'"),
    ],
)
def test_data_and_folder_are_looked_at_before_torch_is_imported(override: str, says: str, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "t.jsonl", {"input": "1", "output": "1", "image": "none.png"})
    files = ["data.dataset_name=ResponseDataset", f"data.train_data_path={data}", f"data.val_data_path={data}"]
    ended = run_script(["--config", str(TINY), *files, override])
    assert (ended.returncode, ended.stdout) == (2, "torch False")
    (line,) = ended.stderr.splitlines()
    assert says in line


def test_ctrl_c_at_any_time_ends_in_one_line() -> None:
    interrupt = "import nemo_rl.data.datasets as d\ndef load_problems(data): raise KeyboardInterrupt\n"
    ended = run_script(["--config", str(TINY)], interrupt + "d.load_problems = load_problems\n")
    assert ended.returncode == 130
    assert ended.stderr == "run_grpo.py: interrupted: what it had started has been ended\n"


def run_script(arguments: list[str], before: str = "") -> subprocess.CompletedProcess[str]:
    """The real script; afterwards it says whether torch has been imported."""
    code = (
        f"import runpy, sys\n{before}sys.argv = ['run_grpo.py', *{arguments!r}]\n"
        f"try:\n    runpy.run_path({str(TINY.parents[1] / 'run_grpo.py')!r}, run_name='__main__')\n"
        "finally:\n    sys.stdout.write(f\"torch {'torch' in sys.modules}\")\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("compiles", [True, False])
def test_a_run_that_compiles_says_that_its_first_step_takes_long(
    compiles: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="nemo_rl")
    setup.prepare_inputs(load_config(TINY, [f"policy.dtensor_cfg.torch_compile={str(compiles).lower()}"]))
    assert any("step 1 is silent while it compiles each block" in line for line in caplog.messages) is compiles


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
