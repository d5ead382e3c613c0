"""The trained model as a Hugging Face folder."""

import copy
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nemo_rl.distributed.weight_transfer.buckets import bucket_layouts
from nemo_rl.models.model_source import PROCESSOR_FILES
from nemo_rl.models.policy.export import dtensor_params_generator
from nemo_rl.models.policy.export_plan import ExportPlan

EXPORT_BUCKET_BYTES = 2**28
"""Gathered at once for a folder on disk."""


@torch.no_grad()
def export_hf(
    model: PreTrainedModel, plan: ExportPlan, tokenizer: PreTrainedTokenizerBase | None, folder: str, dtype: torch.dtype
) -> None:
    """Write model, config, generation config and tokenizer as a Hugging Face folder. Collective; rank 0 writes.

    Weights are written as the plan has them, `dtype` goes into the config; nothing is written until all are gathered.
    """
    is_writer = dist.get_rank() == 0
    weights: dict[str, torch.Tensor] = {}
    layouts = bucket_layouts(plan.manifest, EXPORT_BUCKET_BYTES)
    for name, tensor in dtensor_params_generator(model, plan, layouts=layouts):
        if is_writer and not tensor.is_meta:  # on meta: something went wrong, and is raised at the end
            # A copy of its own: the parts of a bucket share a storage, which safetensors refuses.
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
