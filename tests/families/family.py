"""A model family in tiny form: a random checkpoint as the hub has it, and how an engine serves it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from nemo_rl.models.tiny_model import make_character_tokenizer

FLOAT32_NAMES = ("e_score_correction_bias", "A_log")
"""Tensors that hub checkpoints and engines hold in float32, whatever the rest is in."""

Weights = dict[str, torch.Tensor]


def write_character_tokenizer(folder: Path) -> None:
    make_character_tokenizer().save_pretrained(folder)


@dataclass(frozen=True)
class Family:
    name: str
    """As people call it: `Qwen3-MoE`, `Llama, tied`."""
    architecture: str
    """Class name in transformers."""
    make_config: Callable[[], PretrainedConfig]
    server_args: tuple[str, ...] = ()
    """What its engine needs beyond the usual."""
    generates: bool = True
    """Whether the forward pass of the engine runs on plain PyTorch; otherwise it holds weights only."""
    engine_starts: bool = True
    """False: SGLang refuses it, so only its stream can be proven."""
    image_prompt: str | None = None
    """For a vision-language model: text with the placeholder of one image."""
    to_hub_layout: Callable[[Weights], Weights] = lambda weights: weights
    """From what `save_pretrained` writes to what the hub holds, where the two differ."""
    write_tokenizer: Callable[[Path], None] = write_character_tokenizer


def write_checkpoint(family: Family, folder: Path, *, seed: int) -> None:
    """Write a bfloat16 Hugging Face folder whose every tensor depends on `seed`."""
    model_class: type[PreTrainedModel] = getattr(transformers, family.architecture)
    model = model_class(family.make_config())
    fill_weights(model, seed)
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_floating_point() and name not in FLOAT32_NAMES:
                    tensor.data = tensor.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.config.architectures = [family.architecture]
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(family.to_hub_layout(load_file(file)), file, metadata={"format": "pt"})
    family.write_tokenizer(folder)


@torch.no_grad()
def fill_weights(model: PreTrainedModel, seed: int) -> None:
    """Draw every parameter and persistent buffer: matrices keep the scale of activations, vectors lie around 1."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Any] = model.state_dict()
    for tensor in state.values():
        if not tensor.is_floating_point():
            continue
        values = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() < 2:
            tensor.copy_(1.0 + 0.1 * values)
        else:
            tensor.copy_(values / tensor.shape[-1] ** 0.5)
