"""What leaves the trainer: names, order, values, dtype; and the folder that is exported."""

from pathlib import Path

import policy_cases as cases
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from nemo_rl.distributed.weight_transfer.errors import ManifestError
from nemo_rl.models.policy.export import dtensor_params_generator
from nemo_rl.models.policy.export_plan import ExportPlan
from nemo_rl.models.policy.hf_folder import export_hf
from nemo_rl.models.policy.model_state import clean_name
from nemo_rl.models.policy.parallelize import ShardOptions, load_sharded_model

CONFIGS = {
    "tied": cases.dense_config(tied=True),
    "untied": cases.dense_config(tied=False),
    "moe": cases.moe_config(),
}


WRAPPINGS = {
    "none": {},
    "checkpointing": {"activation_checkpointing": True},
    "compile": {"torch_compile": True},
    "both": {"activation_checkpointing": True, "torch_compile": True},
}


def load(
    folder: str, mesh: DeviceMesh, *, wrapping: str = "none", dtype: torch.dtype = torch.bfloat16
) -> tuple[PreTrainedModel, ExportPlan]:
    return load_sharded_model(folder, mesh, ShardOptions(compute_dtype=dtype, **WRAPPINGS[wrapping]))


def saved_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_names_and_values_are_those_that_save_pretrained_writes(
    config: PretrainedConfig, tmp_path: Path, mesh: DeviceMesh
) -> None:
    folder = cases.write_model(tmp_path / "model", config)
    sent = list(dtensor_params_generator(*load(folder, mesh)))
    names = [name for name, _ in sent]
    saved = saved_tensors(folder)
    assert len(names) == len(set(names))
    assert set(names) == set(saved)
    for name, tensor in sent:
        assert tensor.dtype == torch.bfloat16
        assert tensor.is_contiguous()
        assert type(tensor) is torch.Tensor
        assert torch.equal(tensor, saved[name].to(torch.bfloat16)), name


def test_fused_experts_are_sent_one_by_one(tmp_path: Path, mesh: DeviceMesh) -> None:
    folder = cases.write_model(tmp_path / "model", cases.moe_config())
    sent = dict(dtensor_params_generator(*load(folder, mesh, dtype=torch.float32)))
    assert sent["model.layers.1.mlp.experts.3.gate_proj.weight"].shape == (24, 32)
    assert sent["model.layers.1.mlp.experts.3.down_proj.weight"].shape == (32, 24)
    assert not any("gate_up_proj" in name for name in sent)


def test_a_tied_weight_is_sent_once(tmp_path: Path, mesh: DeviceMesh) -> None:
    folder = cases.write_model(tmp_path / "model", cases.dense_config(tied=True))
    model, plan = load(folder, mesh)
    names = [name for name, _ in dtensor_params_generator(model, plan)]
    assert "lm_head.weight" in model.state_dict()
    assert names.count("model.embed_tokens.weight") == 1
    assert "lm_head.weight" not in names


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_wrappers_leave_no_trace_in_names_or_values(wrapping: str, tmp_path: Path, mesh: DeviceMesh) -> None:
    folder = cases.write_model(tmp_path / "model", cases.dense_config(tied=True))
    model, plan = load(folder, mesh, wrapping=wrapping)
    assert ("torch_compile" in WRAPPINGS[wrapping]) == ("forward" in vars(model.model.layers[0]))
    saved = saved_tensors(folder)
    for _ in range(5):
        sent = dict(dtensor_params_generator(model, plan))
        assert sent.keys() == saved.keys()
        assert all(torch.equal(sent[name], saved[name].to(torch.bfloat16)) for name in saved)


@pytest.mark.parametrize("wrapping", ["none", "checkpointing"])
def test_a_block_that_others_have_wrapped_has_clean_names_too(wrapping: str, tmp_path: Path, mesh: DeviceMesh) -> None:
    folder = cases.write_model(tmp_path / "model", cases.dense_config(tied=True))
    model, plan = load(folder, mesh, wrapping=wrapping)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    assert any("_orig_mod" in name for name in model.state_dict())
    assert {name for name, _ in dtensor_params_generator(model, plan)} == saved_tensors(folder).keys()


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("_orig_mod.model.norm.weight", "model.norm.weight"),
        ("module._orig_mod.lm_head.weight", "lm_head.weight"),
        ("model.layers.0._checkpoint_wrapped_module.mlp.up.weight", "model.layers.0.mlp.up.weight"),
        ("model.layers.0._orig_mod._checkpoint_wrapped_module.a.bias", "model.layers.0.a.bias"),
        ("model.submodule.weight", "model.submodule.weight"),
        ("model.module_list.0.weight", "model.module_list.0.weight"),
    ],
)
def test_clean_name(raw: str, clean: str) -> None:
    assert clean_name(raw) == clean


@pytest.mark.parametrize("as_dtensor", [False, True])
def test_a_persistent_float32_buffer_arrives_exact_and_rotary_caches_do_not_travel(
    as_dtensor: bool, tmp_path: Path, mesh: DeviceMesh
) -> None:
    values = 6.9 + 0.01 * torch.arange(8, dtype=torch.float32)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    folder = cases.write_model(tmp_path / "model", cases.glm_moe_config(), {name: values})
    model, plan = load(folder, mesh)
    gate = model.get_submodule(name.rpartition(".")[0])
    assert gate.e_score_correction_bias.dtype == torch.float32
    if as_dtensor:
        gate.e_score_correction_bias = distribute_tensor(gate.e_score_correction_bias, mesh, [Shard(0)])
    sent = dict(dtensor_params_generator(model, plan))
    assert torch.equal(sent[name], values)
    assert sent[name].dtype == torch.float32
    assert {tensor.dtype for other, tensor in sent.items() if other != name} == {torch.bfloat16}
    assert any("inv_freq" in other for other, _ in model.named_buffers())
    assert not any("inv_freq" in other for other in sent)


def test_a_tie_that_was_broken_after_set_up_fails_the_walk(tmp_path: Path, mesh: DeviceMesh) -> None:
    model, plan = load(cases.write_model(tmp_path / "model", cases.dense_config(tied=True)), mesh)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(
        ManifestError, match=r"tied at set-up and are not: lm_head.weight from model.embed_tokens.weight$"
    ):
        next(dtensor_params_generator(model, plan))


def test_negated_tensors_differ_in_every_value_zeros_too(tmp_path: Path, mesh: DeviceMesh) -> None:
    name = "model.norm.weight"
    folder = cases.write_model(tmp_path / "model", cases.dense_config(tied=True), {name: torch.zeros(64)})
    model, plan = load(folder, mesh)
    plain, negated = (
        dict(dtensor_params_generator(model, plan)),
        dict(dtensor_params_generator(model, plan, negated=True)),
    )
    assert plain.keys() == negated.keys()
    for key, tensor in plain.items():
        assert (tensor.view(torch.int16) != negated[key].view(torch.int16)).all(), key
        assert torch.equal(-tensor, negated[key])


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_name_that_was_not_there_at_set_up_fails_the_walk_before_it_begins(
    kind: str, wrapping: str, tmp_path: Path, mesh: DeviceMesh
) -> None:
    folder = cases.write_model(tmp_path / "model", cases.dense_config(tied=True))
    model, plan = load(folder, mesh, wrapping=wrapping)
    mlp = model.model.layers[0].mlp
    if kind == "parameter":
        mlp.up = mlp.up_proj
        del mlp.up_proj
        message = "gone are model.layers.0.mlp.up_proj.weight; new are model.layers.0.mlp.up.weight"
    else:
        mlp.register_buffer("late", torch.ones(1))
        mlp.register_buffer("scratch", torch.ones(1), persistent=False)
        message = "gone are none; new are model.layers.0.mlp.late"
    with pytest.raises(ManifestError, match=f"changed since set-up: {message}$"):
        next(dtensor_params_generator(model, plan))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_an_exported_folder_loads_with_equal_values(config: PretrainedConfig, tmp_path: Path, mesh: DeviceMesh) -> None:
    folder = cases.write_model(tmp_path / "model", config)
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    export_hf(*load(folder, mesh), None, str(tmp_path / "out"), torch.bfloat16)
    assert (tmp_path / "out/model.safetensors").stat().st_mode & 0o777 == 0o644
    after, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert after.dtype == torch.bfloat16
    assert type(after) is type(before)
    assert "attn_implementation" not in (tmp_path / "out" / "config.json").read_text()
    for name, value in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], value), name


def test_tokenizer_and_generation_config_are_exported(tmp_path: Path, mesh: DeviceMesh) -> None:
    folder = cases.write_model(tmp_path / "model", cases.dense_config(tied=True))
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.chat_template = "{{ messages[0].content }}"
    model, plan = load(folder, mesh)
    model.generation_config.max_length = 17
    export_hf(model, plan, tokenizer, str(tmp_path / "out"), torch.bfloat16)
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.chat_template == tokenizer.chat_template
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.max_length == 17
