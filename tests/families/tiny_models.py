"""A tiny random model of every family that transformers lists as causal-LM or image-text-to-text."""

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import transformers
from family import FLOAT32_NAMES, fill_weights
from shrink_config import Shrinker
from tiny_fixes import FIXES, NOT_BUILDABLE
from transformers import GenerationConfig, GPT2Config, PretrainedConfig, PreTrainedModel, ViTConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import build_glob_alternation
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

MAX_NUM_PARAMETERS = 3_000_000


@dataclass(frozen=True)
class ModelCase:
    model_type: str
    architecture: str
    """Class name in transformers."""
    mapping: Literal["causal-lm", "image-text-to-text"]


class CannotBuild(Exception):  # noqa: N818 it is an answer about a family, not a fault
    """The family has no tiny model; the message says why."""


def all_cases() -> list[ModelCase]:
    """List every class of both mappings once, under the first model type that maps to it; imports no model."""
    cases = [ModelCase(name, cls, "causal-lm") for name, cls in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()]
    cases += [
        ModelCase(name, cls, "image-text-to-text") for name, cls in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
    ]
    by_architecture: dict[str, ModelCase] = {}
    for case in cases:
        by_architecture.setdefault(case.architecture, case)
    return list(by_architecture.values())


def make_tiny_model(case: ModelCase, seed: int) -> PreTrainedModel:
    """Build the model on the CPU with weights drawn from `seed`, in the dtypes of a bfloat16 checkpoint.

    Raises:
        CannotBuild: no tiny config makes this architecture, or the result is not tiny.
    """
    config = make_tiny_config(case)
    with torch.device("meta"):
        twin = model_class(case)._from_config(deepcopy(config), dtype=torch.bfloat16)
    num_parameters = sum(parameter.numel() for parameter in twin.parameters())
    if num_parameters > MAX_NUM_PARAMETERS:
        raise CannotBuild(f"{case.architecture}: {num_parameters} parameters, more than {MAX_NUM_PARAMETERS}")
    model = model_class(case)(config)
    fill_weights(model, seed)
    cast_weights(model, twin)
    return model


def cast_weights(model: PreTrainedModel, twin: PreTrainedModel) -> None:
    """Give every tensor its dtype on the hub: that of loading in bfloat16, or float32 where only engines keep it.

    Args:
        model: In float32, cast in place.
        twin: The same model made in bfloat16; some of its tensors ask for float32 by themselves.
    """
    float32, _, _ = build_glob_alternation(list(twin._get_dtype_plan(torch.bfloat16)) or ["no tensor"])
    dtypes = {name: tensor.dtype for name, tensor in twin.state_dict().items()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.rpartition(".")[-1] not in FLOAT32_NAMES and float32.search(name) is None:
            tensor.data = tensor.data.to(dtypes[name])
    model.config.dtype = torch.bfloat16


def write_tiny_checkpoint(case: ModelCase, folder: Path, seed: int, *, hub_prefixes: bool = False) -> None:
    """Write `model.safetensors` and `config.json`, as `save_pretrained` does.

    Args:
        hub_prefixes: Use the prefixes that the hub's checkpoints of this family have (`vision_tower.vision_model.`);
            `save_pretrained` writes them only for a model that was loaded from such a checkpoint.
    """
    model = make_tiny_model(case, seed)
    if hub_prefixes:
        conversions: Any = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = conversions
    model.config.architectures = [case.architecture]
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder)
    # It notes the dtype of the first parameter, which a few families keep in float32.
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"dtype": "bfloat16"}, indent=2))


def make_tiny_config(case: ModelCase) -> PretrainedConfig:
    if case.architecture in NOT_BUILDABLE:
        raise CannotBuild(f"{case.architecture}: {NOT_BUILDABLE[case.architecture]}")
    shrinker = Shrinker(FIXES)
    if case.architecture == "VisionEncoderDecoderModel":  # has no default
        parts = (shrinker.shrink(ViTConfig()), shrinker.shrink(GPT2Config()))
        return transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    return shrinker.shrink(config_class(case)())


def model_class(case: ModelCase) -> type[PreTrainedModel]:
    cls: type[PreTrainedModel] = getattr(transformers, case.architecture)
    return cls


def config_class(case: ModelCase) -> type[PretrainedConfig]:
    return cast(type[PretrainedConfig], model_class(case).config_class)
