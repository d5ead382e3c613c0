"""Which layers get an adapter, and what an adapter starts from."""

import math

import policy_cases as cases
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from nemo_rl.config.schema import LoRAConfig
from nemo_rl.models.policy.lora import add_adapters, find_targets, init_adapters

KEY = "policy.dtensor_cfg.lora_cfg"


def on_meta(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def chosen(model: PreTrainedModel, targets: list[str], excluded: list[str]) -> list[str]:
    config = LoRAConfig(
        enabled=True, match_all_linear=not targets, target_modules=targets, exclude_modules=excluded, dim=4
    )
    return find_targets(model, config)


@pytest.mark.parametrize(
    ("targets", "excluded", "num_layers", "kinds"),
    [
        ([], [], 14, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ([], ["*.mlp.*", "lm_head"], 8, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (["q_proj", "v_proj"], [], 4, {"q_proj", "v_proj"}),
        (["*_proj"], ["layers.0.*"], 7, {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        (["*"], ["gate_proj"], 12, {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"}),
        (["model.layers.1.mlp.up_proj"], [], 1, {"up_proj"}),
    ],
)
def test_patterns_choose_layers_by_whole_names_and_by_their_ends(
    targets: list[str], excluded: list[str], num_layers: int, kinds: set[str]
) -> None:
    names = chosen(on_meta(cases.dense_config(tied=False)), targets, excluded)
    assert len(names) == num_layers
    assert {name.rpartition(".")[2] for name in names} == kinds


def test_a_subclass_of_linear_gets_no_adapter() -> None:
    class Router(nn.Linear):
        pass

    model = on_meta(cases.dense_config(tied=False))
    model.model.layers[0].mlp.router = Router(64, 4, device="meta")
    assert "model.layers.0.mlp.router" not in chosen(model, ["*"], [])


@pytest.mark.parametrize(
    ("config", "targets", "excluded", "says"),
    [
        (cases.dense_config(tied=True), ["q_proj", "proj"], [], r"target_modules: got 'proj', which no linear layer"),
        (cases.dense_config(tied=False), ["lm_head"], [], r"got 'lm_head'.*the output head takes no adapter$"),
        (
            cases.dense_config(tied=True),
            ["q_proj"],
            ["query"],
            r"got 'query', which no module .* allowed: down_proj, gate_proj, ",
        ),
        (cases.dense_config(tied=True), ["q_proj"], ["*self_attn*"], r"exclude_modules: got \['\*self_attn\*'\]"),
        (
            cases.moe_config(),
            ["gate_up_proj"],
            [],
            r"got 'gate_up_proj', .*nor do the fused experts \(down_proj, gate_up_proj\), which are no linear layers$",
        ),
        (
            cases.glm_moe_config(),
            [],
            [],
            r"in a Glm4MoeForCausalLM peft takes names .*exclude_modules=\[model\.layers\.\*\.mlp\.down_proj,",
        ),
        (cases.glm_moe_config(), ["up_proj"], [], r"peft refuses .*without also targeting gate_proj"),
    ],
    ids=[
        "no such layer",
        "the head",
        "no such module",
        "none is left",
        "experts",
        "meant for experts",
        "half of a pair",
    ],
)
def test_what_cannot_get_an_adapter_is_refused_by_key(
    config: PretrainedConfig, targets: list[str], excluded: list[str], says: str
) -> None:
    lora = LoRAConfig(enabled=True, match_all_linear=not targets, target_modules=targets, exclude_modules=excluded)
    with pytest.raises(ValueError, match=rf"^{KEY}\.(target|exclude)_modules: .*") as refused:
        add_adapters(on_meta(config), lora)
    assert refused.match(says)


def test_how_many_layers_get_an_adapter_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    lora = LoRAConfig(enabled=True)
    add_adapters(on_meta(cases.dense_config(tied=True)), lora)
    add_adapters(AutoModelForCausalLM.from_config(cases.dense_config(tied=True)), lora)
    assert [line for line in caplog.messages if "get an adapter" in line] == [
        f"{KEY}: 14 linear layers get an adapter; the output head does not"
    ]


def test_of_a_mixture_of_experts_what_peft_does_not_take_for_experts_gets_adapters() -> None:
    model = on_meta(cases.glm_moe_config())
    with pytest.raises(ValueError, match="exclude_modules=") as refused:
        add_adapters(model, LoRAConfig(enabled=True))
    patterns = str(refused.value).partition("exclude_modules=[")[2].rstrip("]").split(",")
    assert {pattern.rpartition(".mlp.")[2] for pattern in patterns} == {
        f"{where}{kind}_proj" for where in ("", "shared_experts.") for kind in ("gate", "up", "down")
    }
    updates = add_adapters(on_meta(cases.glm_moe_config()), LoRAConfig(enabled=True, exclude_modules=patterns))
    assert len(updates) == 2 * 4
    assert all(".self_attn." in name for name in updates)


@pytest.mark.parametrize(
    ("method", "std"),
    [("xavier", math.sqrt(2 / (64 + 8))), ("uniform", 1 / math.sqrt(64) / math.sqrt(3)), ("gaussian", 1 / 8)],
)
def test_adapters_start_as_the_config_says(method: str, std: float) -> None:
    lora = LoRAConfig(enabled=True, match_all_linear=False, target_modules=["q_proj"])
    seeds = []
    for seed in (1, 1, 2):
        model = AutoModelForCausalLM.from_config(cases.dense_config(tied=True))
        updates = add_adapters(model, lora)
        init_adapters(model, updates, method, seed)
        assert not any(model.get_parameter(update.b).any() for update in updates.values())
        seeds.append(torch.stack([model.get_parameter(update.a).detach() for update in updates.values()]))
    assert torch.equal(seeds[0], seeds[1])
    assert not torch.equal(seeds[0], seeds[2])
    assert not torch.equal(seeds[0][0], seeds[0][1])
    assert seeds[0].std().item() == pytest.approx(std, rel=0.1)
