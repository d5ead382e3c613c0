"""From files and command line to a config; what is refused by key is in `bad_configs.py`."""

import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl.config.consistency import RESERVED_ARGS
from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import dump_yaml, load_config, read_yaml
from nemo_rl.config.validation import validate

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


def test_what_is_switched_off_may_stand_there_whole() -> None:
    lora = "policy.dtensor_cfg.lora_cfg"
    config = load_config(ROOT / "examples/configs/grpo_lora_cpu.yaml", [f"{lora}.enabled=false", f"{lora}.dim=4"])
    assert config.policy.dtensor_cfg.lora_cfg.if_enabled is None


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("a=b=c", "override: got 'a=b=c'; needs Hydra's form key=value"),
        ("policy.precision=bfloat16,float32", "override: got 'policy.precision=bfloat16,float32'; one value per key"),
        ("~no.such", "override: got '~no.such'; no such key to delete"),
        ("~policy.max_grad_norm.foo", "override: got '~policy.max_grad_norm.foo'; no such key to delete"),
        ("policy=[]", "override: got 'policy=[]'; Cannot merge DictConfig with ListConfig"),
        ("policy.model_name=???", "override: got 'policy.model_name=???'; ??? stands for no value; needs one"),
        ("policy={model_name: ???}", "override: got 'policy={model_name: ???}'; ??? stands for no value; needs one"),
        ("policy@foo=1", "override: got 'policy@foo=1'; a package (@) has no meaning here"),
        ("=5", "override: got '=5'; needs Hydra's form key=value"),
        (
            "logger.log_dir=é",
            "override: got 'logger.log_dir=é'; needs Hydra's form key=value; other than ASCII needs quotes",
        ),
    ],
)
def test_an_override_that_is_none_is_named_in_one_line(override: str, line: str) -> None:
    (got,) = refused(override)
    assert got.startswith(line)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["policy.precision=x", "grpo.seed=y", "cluster.gpu=1"], ["policy.precision", "grpo.seed", "cluster.gpu"]),
        (["policy.foo=1", "policy.generation.top_p=0.5"], ["policy.foo", "policy.generation.top_p"]),
        (
            ["policy.generation.backend=vllm", "policy.generation.vllm_cfg.enforce_eager=true"],
            ["policy.generation.vllm_cfg", "policy.generation.backend"],
        ),
        (
            [f"{RESOURCES}.gpus_per_node=9", "data.prompt=x", "grpo.num_prompts_per_step=7"],
            ["policy.train_global_batch_size", f"{RESOURCES}.gpus_per_node", "data.prompt"],
        ),
    ],
)
def test_several_faults_are_told_at_once(overrides: list[str], keys: list[str]) -> None:
    assert [line.partition(": got ")[0] for line in refused(*overrides)] == keys


@pytest.mark.parametrize(
    ("key", "inside", "outside"),
    [
        ("policy.generation.stop_strings", ["['a']"], ["['']"]),
        ("policy.generation.stop_token_ids", ["[0]"], ["[-1]"]),
        ("policy.generation.temperature", ["0.01", "100.0"], ["0.009", "100.1"]),
        (f"{SERVER}.startup_timeout_s", ["1.0", "604800.0"], ["0.9", "604801.0"]),
        (f"{SERVER}.request_timeout_s", ["1.0", "604800.0"], ["0.9", "604801.0"]),
        (f"{SERVER}.refit_timeout_s", ["1.0", "604800.0"], ["0.9", "604801.0"]),
        (f"{SERVER}.random_seed", ["0", "2147482623"], ["-1", "2147482624"]),
        ("grpo.seed", ["0", "4294967295"], ["-1", "4294967296"]),
        ("data.seed", ["0", "4294967295"], ["-1", "4294967296"]),
        ("cluster.gpus_per_node", ["1023"], ["1025"]),
        ("cluster.num_nodes", [], ["65537"]),
        ("policy.refit_buffer_size_gb", ["1024.0"], ["1025.0", "0.0"]),
        ("logger.log_dir", ["x"], ["''"]),
        ("policy.model_name", ["x"], ["''"]),
    ],
)
def test_bounds(key: str, inside: list[str], outside: list[str]) -> None:
    for value in inside:
        validate(read_yaml(CPU_CONFIG, [f"{key}={value}"]))
    for value in outside:
        (line,) = refused(f"{key}={value}")
        assert line.startswith((f"{key}: got ", f"{key}.0: got "))


@pytest.mark.parametrize("argument", [*RESERVED_ARGS, "--tp=2", "--model", "--speculative-algorithm", "--port=1"])
def test_an_engine_argument_that_the_program_sets_is_refused_by_name(argument: str) -> None:
    (line,) = refused(f"{SERVER}.extra_args=['--mem-fraction-static=0.5','{argument}','x']")
    assert line.startswith(f"{SERVER}.extra_args: got '{argument}'; not allowed: the program sets it from other keys")


def test_the_way_out_of_nccl_on_cpu() -> None:
    (line,) = refused(f"{SERVER}.weight_update_backend=nccl")
    assert line.endswith(f"set {SERVER}.weight_update_backend=gloo or null")
    load_config(CPU_CONFIG, [f"{SERVER}.weight_update_backend=nccl", "cluster.device=auto"])


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
        ("3\n", "holds no mapping of sections"),
        ("!!set {a}\n", "holds no mapping of sections"),
        ("policy: !!set {a}\n", "Value 'set' is not a supported"),
        ("policy: {null: 2}\n", "Incompatible key type 'NoneType'"),
        ("null: 2\n", "Incompatible key type 'NoneType'"),
        ('policy: {model_name: "${"}\n', "no viable alternative"),
        ('data: "${policy}"\n', "Interpolation key 'policy' not found"),
        ("a: ${a}\n", "Recursive interpolation"),
        ("[" * 3000, "maximum recursion depth"),
        ("a: &a [*a]\n", "maximum recursion depth"),
        ("a: !!int x\n", "invalid literal"),
        ("a: !!timestamp x\n", "not YAML of a config"),
        ("a: " + "1" * 5000, "4300 digits"),
        ("defaults: null\n", "defaults: got null; needs the name of a file"),
        ("defaults: 5\n", "defaults: got 5; needs the name of a file"),
        ("defaults: [{a: b}]\n", "needs the name of a file"),
        (f"defaults: {CPU_CONFIG}\ndata: [x]\n", "Cannot merge DictConfig with ListConfig"),
        (None, "No such file"),
        (b"\xff\xfe\x00x", "not a text file"),
    ],
)
def test_an_unreadable_file_is_refused(tmp_path: Path, text: str | bytes | None, says: str) -> None:
    path = tmp_path / "bad.yaml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=says) as caught:
        read_yaml(path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_path_with_a_nul_is_refused() -> None:
    with pytest.raises(ConfigError, match="--config: got .*embedded null"):
        read_yaml(Path("a\0b"))


def test_a_section_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("data: [x]\npolicy: {2: 3}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "data: got ['x']; allowed: a section with the key dataset_name and those of its kind" in caught.value.lines
    assert "policy.2: got 2; allowed: Keys should be strings" in caught.value.lines


def test_a_value_left_open_must_be_given(tmp_path: Path) -> None:
    path = tmp_path / "open.yaml"
    path.write_text("policy: {model_name: '???'}\ngrpo: {seed: '${no.such}'}\n")
    with pytest.raises(ConfigError, match="policy.model_name: got '\\?\\?\\?'; Missing mandatory value: model_name"):
        read_yaml(path)
    with pytest.raises(ConfigError, match="grpo.seed: got '\\?\\?\\?'; Interpolation key 'no.such' not found"):
        read_yaml(path, ["policy.model_name=m"])


@pytest.mark.parametrize("position", [0, 1, 2])
def test_another_kind_of_data_starts_the_section_anew_wherever_it_stands(position: int) -> None:
    overrides = ["data.train_data_path=t", "data.val_data_path=v"]
    overrides.insert(position, "data.dataset_name=ResponseDataset")
    raw = read_yaml(CPU_CONFIG, overrides)
    assert raw["data"] == {"dataset_name": "ResponseDataset", "train_data_path": "t", "val_data_path": "v"}
    assert validate(raw).data.input_key == "input"


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "examples/run_grpo.py", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("arguments", [[], ["--config"], ["--config", "no.yaml"], ["--confg=x"], ["grpo.seed=1"]])
def test_a_wrong_command_line_ends_with_2(arguments: list[str]) -> None:
    done = run_script(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_help_needs_no_config() -> None:
    done = run_script("--help")
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
