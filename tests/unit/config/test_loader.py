"""Bad input: one line with key, value and what is allowed; exit code 2 through the real script."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import dump_yaml, load_config, read_yaml, validate

ROOT = Path(__file__).parents[3]
CPU_CONFIG = ROOT / "examples/configs/grpo_sglang_broadcast_cpu.yaml"
SERVER = "policy.generation.sglang_cfg.sglang_server_config"
RESOURCES = "policy.generation.colocated.resources"


def refused(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(CPU_CONFIG, overrides)
    return list(caught.value.lines)


@pytest.mark.parametrize("path", sorted((ROOT / "examples/configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_is_valid_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    again = tmp_path / "config.yaml"
    again.write_text(dump_yaml(config))
    assert load_config(again) == config


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("policy.precison=bfloat16", "policy.precison: got 'bfloat16'; unknown key; did you mean 'precision'?"),
        ("policy.precision=fp8", "policy.precision: got 'fp8'; allowed: 'bfloat16' or 'float32'"),
        ("policy.train_micro_batch_size=big", "policy.train_micro_batch_size: got 'big'; allowed: a valid integer"),
        ("policy.train_micro_batch_size='8'", "policy.train_micro_batch_size: got '8'; allowed: a valid integer"),
        ("policy.dtensor_cfg.enabled=1", "policy.dtensor_cfg.enabled: got 1; allowed: a valid boolean"),
        ("policy.optimizer.kwargs.lr=-1.0", "policy.optimizer.kwargs.lr: got -1.0; allowed: greater than 0"),
        ("policy.optimizer.kwargs.lr=nan", "policy.optimizer.kwargs.lr: got nan; allowed: a finite number"),
        ("policy.model_name=null", "policy.model_name: got null; allowed: a valid string"),
        (
            "grpo.num_generations_per_prompt=1",
            "grpo.num_generations_per_prompt: got 1; allowed: greater than or equal to 2",
        ),
        (
            "data.dataset_name=gsm8k",
            "data.dataset_name: got 'gsm8k'; allowed: 'arithmetic', 'reasoning_gym', 'ResponseDataset'",
        ),
        (
            "data.operators=[]",
            "data.operators: got []; allowed: List should have at least 1 item after validation, not 0",
        ),
        ("~policy.model_name", "policy.model_name: missing; every run must set it"),
        ("a=b=c", "override: got 'a=b=c'; needs Hydra's form key=value"),
        ("policy.precision=bfloat16,float32", "override: got 'policy.precision=bfloat16,float32'; one value per key"),
        ("~no.such", "override: got '~no.such'; no such key to delete"),
    ],
)
def test_bad_key_or_value_is_named_in_one_line(override: str, line: str) -> None:
    lines = refused(override)
    assert len(lines) == 1
    assert lines[0].startswith(line)


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (
            ["cluster.gpus_per_node=1", f"{RESOURCES}.gpus_per_node=2"],
            f"{RESOURCES}.gpus_per_node",
            "asked 2 slots for engines, available 1",
        ),
        ([f"{RESOURCES}.gpus_per_node=3"], f"{RESOURCES}.gpus_per_node", "asked 3 slots for engines, available 3"),
        ([f"{RESOURCES}.gpus_per_node=0"], f"{RESOURCES}.gpus_per_node", "greater than or equal to 1"),
        ([f"{RESOURCES}.gpus_per_node=null"], f"{RESOURCES}.gpus_per_node", "engines need 1 to 2 of the 3 slots"),
        (
            ["cluster.gpus_per_node=4", f"{RESOURCES}.gpus_per_node=3", f"{SERVER}.num_gpus_per_engine=2"],
            f"{SERVER}.num_gpus_per_engine",
            "asked 2 per engine, available 3",
        ),
        ([f"{SERVER}.num_gpus=2"], f"{SERVER}.num_gpus", "asked 2, available 1"),
        (["cluster.num_nodes=2"], f"{RESOURCES}.gpus_per_node", "the engines take whole nodes: 3"),
    ],
)
def test_more_slots_than_there_are(overrides: list[str], key: str, says: str) -> None:
    (line,) = refused(*overrides)
    assert line.startswith(f"{key}: got ")
    assert says in line


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["policy.train_global_batch_size=96"], "policy.train_global_batch_size: got 96; must divide"),
        (["policy.train_micro_batch_size=5"], "policy.train_micro_batch_size: got 5; must divide 64"),
        (["policy.train_global_batch_size=1"], "policy.train_global_batch_size: got 1; must be a multiple of the 2"),
        (["policy.generation.max_new_tokens=4096"], "policy.generation.max_new_tokens: got 4096; must be below"),
        (["data.num_train=7"], "data.num_train: got 7; must be at least grpo.num_prompts_per_step = 16"),
        (["data.num_validation=0"], "data.num_validation: got 0; validation needs at least 1"),
        (["data.min_terms=3"], "data.min_terms: got 3; must be at most data.max_terms = 2"),
        (["data.min_digits=3"], "data.min_digits: got 3; must be at most data.max_digits = 2"),
        (["data.operators=[+,+]"], "data.operators: got ['+', '+']; each may stand there once"),
        (["data.prompt=hello"], "data.prompt: got 'hello'; must contain {problem}"),
        (
            ["data.dataset_name=ResponseDataset", "data.train_data_path=x.jsonl"],
            "data.val_data_path: got null; validation needs a file",
        ),
    ],
)
def test_contradictions_between_keys(overrides: list[str], line: str) -> None:
    (got,) = refused(*overrides)
    assert got.startswith(line)


def test_several_faults_are_told_at_once() -> None:
    assert len(refused("policy.precision=x", "grpo.seed=y", "cluster.gpu=1")) == 3


def test_defaults_are_inherited_and_overridden(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("a: {x: 1, y: 2}\nlist: [1, 2]\n")
    (tmp_path / "mid.yaml").write_text("defaults: base.yaml\na: {y: 3}\n")
    (tmp_path / "top.yaml").write_text("defaults: [base.yaml, mid.yaml]\nlist: [9]\nb: ${a.x}\n")
    assert read_yaml(tmp_path / "top.yaml", ["a.z=4"]) == {"a": {"x": 1, "y": 3, "z": 4}, "list": [9], "b": 1}


def test_a_file_that_inherits_from_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: b.yaml\n")
    (tmp_path / "b.yaml").write_text("defaults: a.yaml\n")
    with pytest.raises(ConfigError, match="cannot inherit from itself"):
        read_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1", "not YAML"),
        ("- 1\n", "needs a mapping"),
        (None, "No such file"),
        (b"\xff\xfe\x00x", "not a text file"),
    ],
)
def test_an_unreadable_file_is_refused(tmp_path: Path, text: str | bytes | None, says: str) -> None:
    path = tmp_path / "bad.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=says):
        read_yaml(path)


def test_a_value_left_open_must_be_given(tmp_path: Path) -> None:
    path = tmp_path / "open.yaml"
    path.write_text("policy: {model_name: '???'}\ngrpo: {seed: '${no.such}'}\n")
    with pytest.raises(ConfigError, match="policy.model_name: got '\\?\\?\\?'; Missing mandatory value: model_name"):
        read_yaml(path)
    with pytest.raises(ConfigError, match="grpo.seed: got '\\?\\?\\?'; Interpolation key 'no.such' not found"):
        read_yaml(path, ["policy.model_name=m"])


def test_another_kind_of_data_starts_the_section_anew() -> None:
    raw = read_yaml(CPU_CONFIG, ["data.dataset_name=ResponseDataset", "data.train_data_path=t", "data.val_data_path=v"])
    assert raw["data"] == {"dataset_name": "ResponseDataset", "train_data_path": "t", "val_data_path": "v"}
    assert validate(raw).data.input_key == "input"


def run_script(*arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    start_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, ROOT / "examples/run_grpo.py", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done, time.monotonic() - start_s


def test_the_real_script_ends_with_2_and_one_line_before_anything_starts(tmp_path: Path) -> None:
    log_dir = tmp_path / "logs"
    done, _ = run_script("--config", str(CPU_CONFIG), "policy.generation.backend=vllm", f"logger.log_dir={log_dir}")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "policy.generation.backend: got 'vllm'; not supported (generation runs on SGLang); "
        "set policy.generation.backend=sglang\n"
    )
    assert not log_dir.exists()


@pytest.mark.parametrize("arguments", [[], ["--config"], ["--config", "no.yaml"], ["--confg=x"], ["grpo.seed=1"]])
def test_a_wrong_command_line_ends_with_2(arguments: list[str]) -> None:
    done, _ = run_script(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_help_needs_no_config() -> None:
    done, _ = run_script("--help")
    assert done.returncode == 0
    assert "--config FILE.yaml" in done.stdout


def test_loading_a_config_imports_nothing_heavy() -> None:
    code = (
        "import sys; from pathlib import Path; from nemo_rl.config.loader import load_config\n"
        f"load_config(Path({str(CPU_CONFIG)!r}))\n"
        "print(sorted({'torch', 'ray', 'sglang', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
