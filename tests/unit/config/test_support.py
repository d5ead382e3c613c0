"""The support matrix is data: every row of it is a case."""

import itertools
from pathlib import Path

import pytest

from nemo_rl.config.errors import ConfigError
from nemo_rl.config.loader import load_config, read_yaml
from nemo_rl.config.support import ANY, LIMITS, ROUTES, check_support, find_route, matrix_markdown

ROOT = Path(__file__).parents[3]
CPU_CONFIG = ROOT / "examples/configs/grpo_sglang_broadcast_cpu.yaml"
MODE = "policy.generation.sglang_cfg.sglang_server_config.weight_transfer_mode"
COLOCATED = "policy.generation.colocated.enabled"

POLICY_OVERRIDES = {
    "dtensor_v2": [],
    "dtensor_v1": ["policy.dtensor_cfg._v2=false"],
    "megatron": ["policy.megatron_cfg.enabled=true"],
    "none": ["policy.dtensor_cfg.enabled=false"],
}
COMBINATIONS = list(
    itertools.product(POLICY_OVERRIDES, ["sglang", "vllm", "megatron"], [True, False], ["broadcast", "ipc"])
)


@pytest.mark.parametrize(("policy", "generation", "colocated", "mode"), COMBINATIONS)
def test_one_combination_runs_and_every_other_is_refused_with_the_way_out(
    policy: str, generation: str, colocated: bool, mode: str
) -> None:
    overrides = [
        *POLICY_OVERRIDES[policy],
        f"policy.generation.backend={generation}",
        f"{COLOCATED}={str(colocated).lower()}",
        f"{MODE}={mode}",
    ]
    if (policy, generation, colocated, mode) == ("dtensor_v2", "sglang", False, "broadcast"):
        load_config(CPU_CONFIG, overrides)
        return
    with pytest.raises(ConfigError) as caught:
        load_config(CPU_CONFIG, overrides)
    (line,) = caught.value.lines
    route = find_route(policy, generation, colocated, mode)
    assert route is not None
    assert line.startswith(f"{route.key}: got ")
    # What it says to set leads, refusal by refusal, to the supported combination.
    for _ in range(4):
        overrides += line.rpartition("; set ")[2].split()
        try:
            load_config(CPU_CONFIG, overrides)
            return
        except ConfigError as error:
            (line,) = error.lines
    pytest.fail(f"still refused: {line}")


BAD_VALUES = {int: 2, bool: True, float: 0.9, type(None): 5}


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.key)
def test_a_limited_key_is_refused_with_its_supported_value(limit) -> None:  # type: ignore[no-untyped-def]
    text = {"retract": "in_place", "bf16": "fp8"}
    value = text.get(limit.supported[0]) or BAD_VALUES[type(limit.supported[0])]
    override = f"{limit.key}={str(value).lower() if isinstance(value, bool) else value}"
    with pytest.raises(ConfigError) as caught:
        load_config(CPU_CONFIG, [override])
    (line,) = caught.value.lines
    assert line.startswith(f"{limit.key}: got ")
    assert line.endswith(f"set {limit.instead}")
    load_config(CPU_CONFIG, [override, limit.instead])


def test_the_config_is_checked_when_it_is_loaded_and_not_only_in_the_factory() -> None:
    raw = read_yaml(CPU_CONFIG, ["policy.generation.backend=vllm"])
    with pytest.raises(ConfigError):
        check_support(raw)
    with pytest.raises(ConfigError, match="generation runs on SGLang"):
        load_config(CPU_CONFIG, ["policy.generation.backend=vllm"])


def test_exactly_one_route_is_supported() -> None:
    assert [route.transport is not None for route in ROUTES].count(True) == 1
    assert all(route.key and route.why and route.instead for route in ROUTES if route.transport is None)
    assert ANY is None


def test_the_readme_shows_the_table_that_the_guard_uses() -> None:
    assert matrix_markdown() in (ROOT / "README.md").read_text(encoding="utf-8")
