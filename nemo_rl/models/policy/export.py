"""The whole model out of its shards, one tensor at a time, under the names that checkpoints use."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

WRAPPER_PREFIXES = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|module)\.")
"""What torch.compile, activation checkpointing and data parallelism put into names."""


def clean_name(name: str) -> str:
    """The name as it is without wrappers."""
    return WRAPPER_PREFIXES.sub("", name)


def dtensor_params_generator(model: PreTrainedModel, target_dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each weight once: (checkpoint name, whole contiguous tensor). Collective: every rank must walk it all.

    Every rank yields the same names in the same order. Floating tensors come in `target_dtype`. Parameters and
    persistent buffers come in the order of `state_dict`; a tied weight comes once, under the name that is saved.
    """
    for name, value in _entries(model):
        # Cast before the gather: bf16 moves half the bytes of the float32 shards.
        cast = value.to(target_dtype) if value.is_floating_point() else value
        full = cast.full_tensor() if isinstance(cast, DTensor) else cast
        for checkpoint_name, tensor in revert_weight_conversion(model, {name: full}).items():
            yield checkpoint_name, tensor.contiguous()


def _entries(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(clean module name, shard) of everything that is saved."""
    tied = model.all_tied_weights_keys
    for raw_name, value in model.state_dict().items():
        name = clean_name(raw_name)
        if name not in tied:
            yield name, value.detach()


@torch.no_grad()
def export_hf(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: str, dtype: torch.dtype
) -> None:
    """Write model, config, generation config and tokenizer as a Hugging Face folder. Collective; rank 0 writes.

    Floating weights are written in `dtype`; nothing is written until all are gathered.
    """
    is_writer = dist.get_rank() == 0
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in dtensor_params_generator(model, dtype):
        if is_writer:
            # A copy of its own: pieces of fused experts share a storage, which safetensors refuses.
            weights[name] = torch.empty_like(tensor, device="cpu").copy_(tensor)
    if not is_writer:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(weights, folder, metadata={"format": "pt"})
    for file in Path(folder).glob("*.safetensors"):
        file.chmod(0o644)  # safetensors writes for the owner alone; who serves the model may be another user
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
