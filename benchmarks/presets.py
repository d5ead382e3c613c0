"""Models by preset: the shapes of known families with random weights, written from a config; nothing is downloaded.

To write one: `uv run benchmarks/presets.py PRESET FOLDER`.
"""

import argparse
import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from preset_shapes import PRESETS
from safetensors.torch import save_file
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from nemo_rl.models.tiny_model import make_character_tokenizer

MAX_SHARD_BYTES = 4_000_000_000
WEIGHT_STD = 0.02
DTYPE = torch.bfloat16
Shapes = dict[str, tuple[int, ...]]


def write_model(preset: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a Hugging Face folder: config, bfloat16 weights in shards, a tokenizer of one token per character.

    Matrices are drawn from normal(0, 0.02), norms are 1. At most one shard of 4 GB is in memory at a time. On a CUDA
    device the values are drawn there; they differ from those of the same seed on a CPU.

    Raises:
        ValueError: no such preset.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = make_config(preset)
    config.save_pretrained(folder)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    GenerationConfig(**special, do_sample=True).save_pretrained(folder)
    make_character_tokenizer().save_pretrained(folder)
    _write_weights(checkpoint_shapes(preset), folder, seed)
    return folder


def make_config(preset: str) -> PretrainedConfig:
    """Make the transformers config of `preset`; raises ValueError when there is no such preset."""
    if preset not in PRESETS:
        raise ValueError(f"preset: got {preset!r}; allowed: {', '.join(PRESETS)}")
    chosen = PRESETS[preset]
    config_class: Any = _model_class(chosen.architecture).config_class
    # A config keeps, and completes, what it is given.
    config: PretrainedConfig = config_class(
        **deepcopy(chosen.config), pad_token_id=0, bos_token_id=1, eos_token_id=2, dtype=DTYPE
    )
    config.architectures = [chosen.architecture]
    return config


def checkpoint_shapes(preset: str) -> Shapes:
    """Shapes by name as the hub's checkpoints have them: experts one by one, tied weights once. Reads no weight."""
    config = make_config(preset)
    with torch.device("meta"):
        model = _model_class(PRESETS[preset].architecture)._from_config(config, dtype=DTYPE)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}


def num_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of a bfloat16 tensor of that shape."""
    return DTYPE.itemsize * torch.Size(shape).numel()


def _model_class(architecture: str) -> type[PreTrainedModel]:
    cls: type[PreTrainedModel] = getattr(transformers, architecture)
    return cls


def _write_weights(shapes: Shapes, folder: Path, seed: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    shards = list(_shards(shapes))
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        weights = {name: _draw(shapes[name], generator) for name in names}
        save_file(weights, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index_of_weights = {"metadata": {"total_size": sum(map(num_bytes, shapes.values()))}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index_of_weights, indent=1), encoding="utf-8")


def _shards(shapes: Shapes) -> Iterator[list[str]]:
    """Names in their order, cut so that a shard stays within `MAX_SHARD_BYTES`; one larger tensor is a shard alone."""
    names: list[str] = []
    filled_bytes = 0
    for name, shape in shapes.items():
        if names and filled_bytes + num_bytes(shape) > MAX_SHARD_BYTES:
            yield names
            names, filled_bytes = [], 0
        names.append(name)
        filled_bytes += num_bytes(shape)
    yield names


def _draw(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """One bfloat16 tensor on the CPU: ones for a norm, else random values."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=DTYPE)
    weight = torch.empty(shape, dtype=DTYPE, device=generator.device)
    return weight.normal_(std=WEIGHT_STD, generator=generator).cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a model with random weights.")
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_model(arguments.preset, arguments.folder)


if __name__ == "__main__":
    main()
