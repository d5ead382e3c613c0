"""LoRA at 1 and 2 ranks against peft on a plain model in one process: training, what is sent, what is exported.

Tolerances as in test_fsdp_parity.py: 1e-5 on loss, gradient norm (relative) and every adapter weight in float32. What is
sent is compared bit by bit.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lora_cases
import policy_cases as cases
import pytest
import torch
from lora_cases import LORA, SCALE, LoraCase
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, HrmTextConfig, PretrainedConfig

from nemo_rl.config.schema import LoRAConfig
from nemo_rl.models.policy.export import dtensor_params_generator
from nemo_rl.models.policy.parallelize import ShardOptions, load_sharded_model

ONE = "model.layers.1.self_attn.q_proj"
UP = "model.layers.0.mlp.up_proj.weight"
Runs = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tied, with biases in the attention, and with a negative zero in a weight and in the bias."""
    config = cases.dense_config(tied=True)
    config.attention_bias = True
    values = {f"{ONE}.bias": torch.linspace(-0.0, 1, 64), UP: torch.randn(96, 64)}
    values[UP][3, 5] = -0.0
    return cases.write_model(tmp_path_factory.mktemp("lora") / "model", config, values)


def case_list(folder: str) -> list[LoraCase]:
    one = {**LORA, "match_all_linear": False, "target_modules": ["layers.1.*.q_proj"]}
    return [
        LoraCase("all", folder, cases.free_port(), "float32", LORA),
        LoraCase("one", folder, cases.free_port(), "bfloat16", one, checkpointing=True),
    ]


@pytest.fixture(scope="module")
def runs(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """World size -> per rank: case name -> what the rank saw."""
    out = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(lora_cases.rank_main, (2, case_list(folder), str(out)), nprocs=2)
    two = [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    return {1: [{case.name: lora_cases.run_case(case, 0, 1) for case in case_list(folder)}], 2: two}


@dataclass(frozen=True)
class PlainLora:
    losses: list[float]
    grad_norms: list[float]
    adapters: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def plain(folder: str, runs: Runs) -> PlainLora:
    """Three steps of peft on a plain model, from the same adapters."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    inject_adapter_in_model(LoraConfig(r=LORA["dim"], lora_alpha=LORA["alpha"], target_modules=every), model)
    model.load_state_dict(runs[1][0]["all"]["start"], strict=False)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    betas = (cases.ADAMW["betas"][0], cases.ADAMW["betas"][1])
    optimizer = torch.optim.AdamW(trained.values(), **{**cases.ADAMW, "betas": betas}, foreach=False)
    losses, norms = [], []
    for step in range(cases.NUM_STEPS):
        factor = min(1.0, 0.5 + 0.5 * step / cases.WARM_UP["total_iters"])
        optimizer.param_groups[0]["lr"] = cases.ADAMW["lr"] * factor
        optimizer.zero_grad()
        loss = cases.plain_loss(model, cases.make_batch(step))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), cases.MAX_GRAD_NORM).item())
        optimizer.step()
        losses.append(loss.item())
    return PlainLora(losses, norms, {name: value.detach() for name, value in trained.items()})


@pytest.mark.parametrize("world_size", [1, 2])
def test_three_lora_steps_equal_peft_on_a_plain_model(world_size: int, runs: Runs, plain: PlainLora) -> None:
    assert len(plain.adapters) == 2 * 7 * 2
    for ranks in runs[world_size]:
        seen = ranks["all"]
        assert [result.loss for result in seen["results"]] == pytest.approx(plain.losses, rel=1e-5, abs=1e-5)
        assert [result.grad_norm for result in seen["results"]] == pytest.approx(plain.grad_norms, rel=1e-5)
        assert seen["adapters"].keys() == plain.adapters.keys()
        for name, value in seen["adapters"].items():
            torch.testing.assert_close(value, plain.adapters[name], rtol=1e-5, atol=1e-5)
            assert not torch.equal(value, seen["start"][name]), name


def test_adapters_start_from_the_seed_alone(runs: Runs) -> None:
    first, second, third = (ranks["all"]["start"] for ranks in (*runs[1], *runs[2]))
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert torch.equal(value, third[name])
        assert value.any() == (".lora_A." in name)


@pytest.mark.parametrize("name", ["all", "one"])
def test_the_reference_is_the_base_without_adapters_and_no_second_model(name: str, runs: Runs) -> None:
    for ranks in runs[1] + runs[2]:
        seen = ranks[name]
        assert not seen["has_copy"]
        assert torch.equal(seen["reference"], seen["before"])
        assert torch.equal(seen["reference_after"], seen["reference"])
        assert (seen["after"] - seen["before"]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["all", "one"])
def test_the_base_stays_bit_for_bit_through_training_refits_and_exports(name: str, runs: Runs) -> None:
    digests = {ranks[name][when] for ranks in runs[1] + runs[2] for when in ("base", "base_after")}
    assert len(digests) == 1


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ["all", "one"])
def test_the_first_refit_sends_the_checkpoint_bit_by_bit(name: str, world_size: int, runs: Runs, folder: str) -> None:
    saved, sent = load_file(Path(folder) / "model.safetensors"), runs[world_size][0][name]["first_payload"]
    assert sent.keys() == saved.keys()
    for key, value in saved.items():
        assert bits(sent[key]) == bits(value.to(sent[key].dtype)), key


@pytest.mark.parametrize("world_size", [1, 2])
def test_two_refits_with_different_adapters(world_size: int, runs: Runs, folder: str) -> None:
    saved, seen = load_file(Path(folder) / "model.safetensors"), runs[world_size][0]["one"]
    whole, merged_alone, *later = seen["payloads"]
    assert whole.keys() == saved.keys(), "no adapter names on the wire"
    assert merged_alone.keys() == {f"{ONE}.weight"}, "the engines have the rest"
    for payload, adapters in ((whole, seen["adapters"]), (merged_alone, seen["last_adapters"])):
        a, b = (adapters[f"{ONE}.lora_{which}.default.weight"] for which in "AB")
        expected = (saved[f"{ONE}.weight"] + SCALE * (b @ a)).to(torch.bfloat16)
        assert torch.equal(payload[f"{ONE}.weight"], expected)
        assert not torch.equal(expected, saved[f"{ONE}.weight"].to(torch.bfloat16))
    assert bits(whole[f"{ONE}.weight"]) != bits(merged_alone[f"{ONE}.weight"])
    assert all(torch.equal(payload[f"{ONE}.weight"], merged_alone[f"{ONE}.weight"]) for payload in later)
    assert len(later) == lora_cases.NUM_REFITS - 2
    assert all(rank["one"]["is_state_kept"] for rank in runs[world_size])
    for key in saved.keys() - {f"{ONE}.weight"}:
        assert bits(whole[key]) == bits(saved[key].to(torch.bfloat16)), key


@pytest.mark.parametrize("world_size", [1, 2])
def test_both_exports_are_the_same_model(world_size: int, runs: Runs, folder: str) -> None:
    export = case_list(folder)[0].export(world_size)
    merged, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    by_peft = PeftModel.from_pretrained(base, f"{export}_adapter").merge_and_unload()
    assert merged.state_dict().keys() == by_peft.state_dict().keys()
    for key, value in by_peft.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[key], value, rtol=1e-6, atol=1e-7)
    ids = cases.make_batch(5)["input_ids"]
    with torch.no_grad():
        ours, theirs = (model.eval()(input_ids=ids).logits.log_softmax(-1) for model in (merged, by_peft))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (Path(f"{export}_adapter") / "adapter_model.safetensors").stat().st_mode & 0o777 == 0o644


def test_the_adapter_folder_says_what_it_is(runs: Runs, folder: str) -> None:
    every, one = (
        json.loads(Path(f"{case.export(2)}_adapter/adapter_config.json").read_text()) for case in case_list(folder)
    )
    assert every["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    assert one["target_modules"] == [ONE]
    assert (one["r"], one["lora_alpha"], one["base_model_name_or_path"]) == (4, 24, "tiny")
    held = load_file(Path(f"{case_list(folder)[1].export(2)}_adapter/adapter_model.safetensors"))
    assert {name: list(value.shape) for name, value in held.items()} == {
        f"base_model.model.{ONE}.lora_A.weight": [4, 64],
        f"base_model.model.{ONE}.lora_B.weight": [64, 4],
    }


def hrm_config() -> PretrainedConfig:
    """Its checkpoint holds gate, q, k and v as one tensor, gate and up as another."""
    return HrmTextConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=64,
    )


@pytest.mark.parametrize(
    ("config", "targets"),
    [(hrm_config(), ["q_proj", "up_proj"]), (cases.moe_config(), ["q_proj", "o_proj"])],
    ids=["fused in the checkpoint", "beside fused experts"],
)
def test_adapters_are_merged_before_a_conversion(
    config: PretrainedConfig, targets: list[str], tmp_path: Path, mesh: DeviceMesh
) -> None:
    folder = cases.write_model(tmp_path / "model", config)
    lora = LoRAConfig(enabled=True, match_all_linear=False, target_modules=targets, dim=4, alpha=24)
    model, plan = load_sharded_model(folder, mesh, ShardOptions(compute_dtype=torch.float32, lora=lora))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    for weight, update in plan.updates.items():
        shard = model.get_parameter(update.b).detach().to_local()  # one rank has all of it
        shard.copy_(torch.randn(shard.shape, generator=generator))
        a, b = (lora_cases.whole(model.get_parameter(name)) for name in (update.a, update.b))
        plain.get_parameter(weight).data += SCALE * (b @ a)
    plain.save_pretrained(tmp_path / "merged")
    sent, saved = dict(dtensor_params_generator(model, plan)), load_file(tmp_path / "merged/model.safetensors")
    assert plan.updates
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], value) for name, value in saved.items())
