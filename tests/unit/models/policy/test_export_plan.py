"""The manifest against the checkpoint on disk: what is repaired, by which rule, and what is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import policy_cases as cases
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig

from nemo_rl.models.policy.checkpoint import check_checkpoint, read_headers
from nemo_rl.models.policy.export import dtensor_params_generator
from nemo_rl.models.policy.parallelize import ShardOptions, load_sharded_model

Weights = dict[str, torch.Tensor]
UP = "model.layers.0.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"


def write(folder: Path, config: PretrainedConfig, change: Callable[[Weights], object] = lambda weights: None) -> Path:
    """Write a model whose weights on disk `change` has edited."""
    cases.write_model(folder, config)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rename(old: str, new: str) -> Callable[[Weights], object]:
    return lambda weights: weights.update({new: weights.pop(old)})


def replace(name: str, convert: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: convert(weights[name]).contiguous()})


@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        (cases.dense_config(tied=True), rename(UP, UP.replace("up_", "upper_")), f"lacks weights .*: {UP}$"),
        (cases.dense_config(tied=True), replace(UP, lambda t: t.T), rf"{UP} \[64, 96\] instead of \[96, 64\]$"),
        (cases.dense_config(tied=True), replace(UP, lambda t: t[:5]), rf"{UP} \[5, 64\] instead of \[96, 64\]$"),
        (
            cases.dense_config(tied=False),
            replace("model.norm.weight", lambda t: t.long()),
            r"model.norm.weight \[64\] bfloat16: the checkpoint holds it as I64$",
        ),
        (cases.moe_config(), lambda w: w.pop(EXPERT), r"experts.down_proj \[3, 32, 24\] instead of \[4, 32, 24\]$"),
    ],
    ids=["renamed", "transposed", "cut", "integer", "an expert is gone"],
)
def test_a_checkpoint_that_is_not_the_models_is_refused_by_name(
    config: PretrainedConfig, change: Callable[[Weights], object], says: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "model", config, change)
    with pytest.raises(ValueError, match=f"policy.model_name: .*{says}"):
        check_checkpoint(folder, torch.bfloat16)


def test_a_config_that_ties_what_differs_on_disk_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", cases.dense_config(tied=False))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(
        ValueError, match=r"policy.model_name: config.json ties lm_head.weight to model.embed_tokens.weight"
    ):
        check_checkpoint(folder, torch.bfloat16)


def to_index(folder: Path, file: str = "model-00001-of-00001.safetensors") -> Path:
    """Move the weights into a file that an index names."""
    names = list(read_headers(folder))
    (folder / "model.safetensors").rename(folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, file)}))
    return folder


def remove_index(folder: Path) -> None:
    (to_index(folder) / INDEX).unlink()


def remove_file(folder: Path) -> None:
    (to_index(folder) / "model-00001-of-00001.safetensors").unlink()


def leave_both(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (to_index(folder) / "model.safetensors").write_bytes(weights)


def add_adapter(folder: Path) -> None:
    save_file({"a": torch.ones(1)}, folder / "adapter_model.safetensors")


def cut_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (remove_index, r"holds \['model-00001-of-00001.safetensors'\] and no model.safetensors.index.json"),
        (remove_file, "names files that are not there: model-00001-of-00001.safetensors"),
        (leave_both, "holds both model.safetensors and model.safetensors.index.json"),
        (add_adapter, "holds .*adapter_model.safetensors.* and no model.safetensors.index.json"),
        (cut_file, "model.safetensors cannot be read"),
        (lambda folder: (to_index(folder) / INDEX).write_text("{}"), "is no index of weights"),
        (lambda folder: (to_index(folder) / INDEX).write_text("{"), "is no index of weights"),
        (lambda folder: (to_index(folder) / INDEX).write_text('{"weight_map": []}'), "is no index of weights"),
    ],
)
def test_files_that_trainer_and_engine_would_not_read_alike_are_refused(
    change: Callable[[Path], object], says: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "model", cases.dense_config(tied=True))
    change(folder)
    with pytest.raises(ValueError, match=f"^policy.model_name: .*{says}"):
        check_checkpoint(folder, torch.bfloat16)


def test_a_file_of_another_format_beside_the_weights_is_no_harm(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", cases.dense_config(tied=True))
    save_file({"a": torch.ones(1)}, folder / "consolidated.safetensors")
    check_checkpoint(folder, torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": "Qwen3ForCausalLM"}, "architectures.*'Qwen3ForCausalLM'.* a list"),
        ({"architectures": ["Qwen3Model"]}, "names the architecture 'Qwen3Model'"),
        ({"hidden_size": "x"}, "cannot read .*config.json"),
        ({"num_attention_heads": 0}, "cannot (read|load)"),
        ({"model_type": "unheard_of", "auto_map": {"AutoConfig": "a.B"}}, "cannot read .*config.json"),
    ],
)
def test_a_config_that_makes_no_model_is_one_line(change: dict[str, object], says: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", cases.dense_config(tied=True))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=f"^policy.model_name: .*{says}") as refused:
        check_checkpoint(folder, torch.bfloat16)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("config", [cases.dense_config(tied=True), cases.dense_config(tied=False), cases.moe_config()])
def test_the_check_takes_no_weights_into_memory_and_passes_what_loads(config: PretrainedConfig, tmp_path: Path) -> None:
    check_checkpoint(write(tmp_path / "model", config), torch.bfloat16)


def plan_of(folder: Path, mesh: DeviceMesh) -> tuple[dict[str, torch.dtype], Weights]:
    """Planned dtypes, and what is streamed."""
    model, plan = load_sharded_model(str(folder), mesh, ShardOptions(compute_dtype=torch.bfloat16))
    return {spec.name: spec.dtype for spec in plan.manifest.specs}, dict(dtensor_params_generator(model, plan))


def test_a_float32_checkpoint_does_not_double_the_wire(tmp_path: Path, mesh: DeviceMesh) -> None:
    folder = write(tmp_path / "model", cases.glm_moe_config())
    assert {dtype for _, dtype in read_headers(folder).values()} == {"F32"}
    planned, sent = plan_of(folder, mesh)
    exact = {name for name, dtype in planned.items() if dtype == torch.float32}
    assert exact == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    assert {name: tensor.dtype for name, tensor in sent.items()} == planned


def test_float32_among_narrower_tensors_stays(tmp_path: Path, mesh: DeviceMesh) -> None:
    norm = "model.layers.1.input_layernorm.weight"
    values = 1.0 + torch.arange(64) / 1000.0

    def to_bfloat16_but_one(weights: Weights) -> None:
        weights.update({name: tensor.bfloat16() for name, tensor in weights.items()})
        weights[norm] = values

    planned, sent = plan_of(write(tmp_path / "model", cases.dense_config(tied=True), to_bfloat16_but_one), mesh)
    assert [name for name, dtype in planned.items() if dtype == torch.float32] == [norm]
    assert torch.equal(sent[norm], values)


def test_a_head_on_disk_beside_the_embedding_it_is_tied_to_is_not_sent(tmp_path: Path, mesh: DeviceMesh) -> None:
    def add_head(weights: Weights) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    planned, _ = plan_of(write(tmp_path / "model", cases.dense_config(tied=True), add_head), mesh)
    assert "lm_head.weight" not in planned
    assert "model.embed_tokens.weight" in planned


def test_what_the_model_has_no_place_for_is_left_to_the_engines(tmp_path: Path, mesh: DeviceMesh) -> None:
    extra = "model.layers.7.mlp.up_proj.weight"
    folder = write(tmp_path / "model", cases.dense_config(tied=True), lambda w: w.update({extra: torch.ones(2, 2)}))
    check_checkpoint(folder, torch.bfloat16)
    planned, _ = plan_of(folder, mesh)
    assert extra not in planned


def test_headers_of_a_checkpoint_in_several_files(tmp_path: Path) -> None:
    whole = read_headers(write(tmp_path / "one", cases.moe_config()))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert (tmp_path / "many/model.safetensors.index.json").is_file()
    assert read_headers(tmp_path / "many") == whole
