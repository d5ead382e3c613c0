"""Tests of the tiny models: every family is made, the rules keep both kinds of layers, checkpoints are fixed points."""

from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from shrink_config import MAX_NUM_LAYERS, VOCABULARY, Shrinker
from tiny_fixes import CHANGED_BY_LOADING, FIXES, NOT_BUILDABLE
from tiny_models import (
    MAX_NUM_PARAMETERS,
    CannotBuild,
    ModelCase,
    all_cases,
    make_tiny_config,
    make_tiny_model,
    model_class,
    write_tiny_checkpoint,
)
from transformers import DeepseekV3Config, GptOssConfig, PretrainedConfig, Qwen3NextConfig, Qwen3VLConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

CASES = {case.architecture: case for case in all_cases()}


def walk(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from walk(value)


def write_and_load(case: ModelCase, folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    write_tiny_checkpoint(case, folder, seed)
    return load_file(folder / "model.safetensors")


def test_cases_are_the_classes_of_both_mappings() -> None:
    listed = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}

    assert set(CASES) == listed
    assert len(all_cases()) == len(listed) == 251


@pytest.mark.parametrize("architecture", sorted(CASES))
def test_every_family_is_made_tiny(architecture: str) -> None:
    if architecture in NOT_BUILDABLE:
        with pytest.raises(CannotBuild, match=architecture):
            make_tiny_config(CASES[architecture])
        return
    config = make_tiny_config(CASES[architecture])
    with torch.device("meta"):
        model = model_class(CASES[architecture])(config)

    assert sum(parameter.numel() for parameter in model.parameters()) <= MAX_NUM_PARAMETERS
    for part in walk(config):
        ids = [value for name, value in vars(part).items() if name.endswith("_token_id") and isinstance(value, int)]
        assert all(token_id < VOCABULARY for token_id in ids)


def test_a_model_that_is_not_tiny_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_models, "MAX_NUM_PARAMETERS", 10)

    with pytest.raises(CannotBuild, match=r"LlamaForCausalLM: \d+ parameters, more than 10"):
        make_tiny_model(CASES["LlamaForCausalLM"], seed=0)


def test_first_layer_of_every_kind_stays() -> None:
    hybrid: Any = Shrinker(FIXES).shrink(Qwen3NextConfig())
    dense_and_sparse: Any = Shrinker(FIXES).shrink(DeepseekV3Config())
    windowed: Any = Shrinker(FIXES).shrink(GptOssConfig())

    assert hybrid.layer_types == ["linear_attention", "full_attention"]
    assert hybrid.num_hidden_layers == 2
    assert (dense_and_sparse.first_k_dense_replace, dense_and_sparse.num_hidden_layers) == (1, 2)
    assert windowed.layer_types == ["sliding_attention", "full_attention"]


def test_lists_of_layer_indices_follow_the_layers_that_stay() -> None:
    tiny: Any = Shrinker(FIXES).shrink(Qwen3VLConfig())

    assert tiny.vision_config.depth == 2 <= MAX_NUM_LAYERS
    assert tiny.vision_config.deepstack_visual_indexes == (1,)


def test_token_ids_stay_distinct_and_equal_ids_stay_equal() -> None:
    shrinker = Shrinker(FIXES)
    tiny: Any = shrinker.shrink(Qwen3VLConfig())
    text: Any = shrinker.shrink(Qwen3NextConfig(eos_token_id=Qwen3VLConfig().image_token_id, bos_token_id=1))

    ids = (tiny.image_token_id, tiny.video_token_id, tiny.vision_start_token_id, tiny.vision_end_token_id)
    assert len(set(ids)) == 4
    assert (text.eos_token_id, text.bos_token_id) == (tiny.image_token_id, 1)


def test_heads_divide_and_groups_stay_groups() -> None:
    tiny: Any = Shrinker(FIXES).shrink(GptOssConfig())

    assert tiny.num_attention_heads % tiny.num_key_value_heads == 0
    assert (tiny.hidden_size, tiny.head_dim, tiny.num_local_experts) == (32, 8, 4)


@pytest.mark.parametrize(
    "architecture",
    [
        "Gemma3ForConditionalGeneration",
        "HrmTextForCausalLM",
        "Kimi_K25ForConditionalGeneration",
        "LlamaForCausalLM",
        "Qwen3MoeForCausalLM",
        "XLNetLMHeadModel",
    ],
)
@pytest.mark.parametrize("hub_prefixes", [False, True])
def test_loaded_model_saves_the_same_checkpoint(architecture: str, hub_prefixes: bool, tmp_path: Path) -> None:
    case = CASES[architecture]
    write_tiny_checkpoint(case, tmp_path / "first", seed=0, hub_prefixes=hub_prefixes)
    loaded: Any = model_class(case).from_pretrained(tmp_path / "first", output_loading_info=True)
    model, info = loaded
    model.save_pretrained(tmp_path / "second")
    first, second = (load_file(tmp_path / part / "model.safetensors") for part in ("first", "second"))

    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert model.config.architectures == [architecture]
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


def test_hub_prefixes_name_the_vision_tower_as_the_hub_does(tmp_path: Path) -> None:
    case = CASES["Gemma3ForConditionalGeneration"]
    write_tiny_checkpoint(case, tmp_path, seed=0, hub_prefixes=True)

    assert "vision_tower.vision_model.embeddings.patch_embedding.weight" in load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("architecture", sorted(CHANGED_BY_LOADING))
def test_loading_changes_the_listed_tensors_only(architecture: str, tmp_path: Path) -> None:
    disk = write_and_load(CASES[architecture], tmp_path / "first")
    model_class(CASES[architecture]).from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    again = load_file(tmp_path / "second" / "model.safetensors")

    changed = {name for name in disk if not torch.equal(disk[name], again[name])}
    listed = {name for name in disk if any(fnmatch(name, pattern) for pattern in CHANGED_BY_LOADING[architecture])}
    assert changed == listed


def test_every_tensor_depends_on_the_seed(tmp_path: Path) -> None:
    case = CASES["Qwen3NextForCausalLM"]
    first, again, other = (write_and_load(case, tmp_path / str(n), seed) for n, seed in enumerate((0, 0, 1)))

    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not [name for name, tensor in first.items() if torch.equal(tensor, other[name])]


def test_float32_stays_where_engines_and_models_keep_it() -> None:
    hybrid = make_tiny_model(CASES["Qwen3NextForCausalLM"], seed=0).state_dict()
    router = make_tiny_model(CASES["DeepseekV3ForCausalLM"], seed=0).state_dict()

    assert {name.rpartition(".")[-1] for name, tensor in hybrid.items() if tensor.dtype == torch.float32} == {"A_log"}
    assert [name for name, tensor in router.items() if tensor.dtype == torch.float32] == [
        "model.layers.1.mlp.gate.e_score_correction_bias"
    ]
