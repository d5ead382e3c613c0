"""The whole model out of its shards, one tensor at a time, under the names that checkpoints use."""

import copy
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_rl.distributed.weight_transfer.errors import ManifestError
from nemo_rl.distributed.weight_transfer.manifest import listed
from nemo_rl.models.model_source import PROCESSOR_FILES
from nemo_rl.models.policy.export_plan import ExportPlan

WRAPPER_PREFIXES = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|module)\.")
"""What torch.compile, activation checkpointing and data parallelism put into names."""


def clean_name(name: str) -> str:
    """The name as it is without wrappers."""
    return WRAPPER_PREFIXES.sub("", name)


def dtensor_params_generator(
    model: PreTrainedModel, plan: ExportPlan, *, negated: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of the manifest once, in its order: (checkpoint name, whole contiguous tensor).

    Collective: every rank must walk it all. At most one module tensor is whole at a time, or those of one layer that a
    conversion needs together, such as its stack of experts.

    Args:
        negated: every bit pattern differs from the weight's (-x, for integers ~x), zeros too.

    Raises:
        ManifestError: on every rank, before anything is gathered, when the model has other names than at set-up.
    """
    state = {clean_name(name): value.detach() for name, value in model.state_dict().items()}
    _check_sources(model, state, plan)
    for group, specs in zip(plan.groups, plan.manifest.by_sources(), strict=True):
        # Cast before the gather: bf16 moves half the bytes of the float32 shards.
        dtype = max((spec.dtype for spec in specs), key=lambda dtype: dtype.itemsize)
        gathered = {name: _gather(state[name].to(dtype)) for name in group.sources}
        made = group.to_checkpoint(gathered, plan.twin)
        del gathered
        for spec in specs:
            tensor = made.pop(spec.name)
            if spec.transposed:
                tensor = tensor.transpose(-1, -2)
            tensor = tensor.to(spec.dtype)
            if negated:
                tensor = tensor.neg() if tensor.is_floating_point() else ~tensor
            yield spec.name, tensor.contiguous()


def _gather(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _check_sources(model: PreTrainedModel, state: dict[str, torch.Tensor], plan: ExportPlan) -> None:
    tied = plan.twin.all_tied_weights_keys
    parameters = {clean_name(name): value for name, value in model.named_parameters(remove_duplicate=False)}
    if parted := [f"{a} from {b}" for a, b in tied.items() if parameters.get(a) is not parameters.get(b)]:
        raise ManifestError(
            f"{type(model).__name__} has weights that were tied at set-up and are not: {listed(parted)}"
        )
    planned = {source for spec in plan.manifest.specs for source in spec.sources}
    held = state.keys() - tied.keys()
    if planned != held:
        raise ManifestError(
            f"{type(model).__name__} has changed since set-up: gone are {listed(sorted(planned - held)) or 'none'}; "
            f"new are {listed(sorted(held - planned)) or 'none'}"
        )


@torch.no_grad()
def export_hf(
    model: PreTrainedModel, plan: ExportPlan, tokenizer: PreTrainedTokenizerBase | None, folder: str, dtype: torch.dtype
) -> None:
    """Write model, config, generation config and tokenizer as a Hugging Face folder. Collective; rank 0 writes.

    Weights are written as the plan has them, `dtype` goes into the config; nothing is written until all are gathered.
    """
    is_writer = dist.get_rank() == 0
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in dtensor_params_generator(model, plan):
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
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:  # engines go by the text part of a vision-language model
            part.dtype = dtype
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def copy_processor(source: str, folder: str) -> None:
    """Copy what turns pictures into tokens, where the model has it."""
    for name in PROCESSOR_FILES:
        if (Path(source) / name).is_file():
            shutil.copy(Path(source) / name, folder)
