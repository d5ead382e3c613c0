"""The adapters of a LoRA policy as a folder that peft loads on the base model."""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import PreTrainedModel

from nemo_rl.config.schema import LoRAConfig
from nemo_rl.models.policy.export_plan import ExportPlan
from nemo_rl.models.policy.gather import Gather, gather_to_rank0
from nemo_rl.models.policy.lora import peft_config
from nemo_rl.models.policy.model_state import clean_state

_MESSAGE_BYTES = 2**26


@torch.no_grad()
def export_adapter(
    model: PreTrainedModel, plan: ExportPlan, config: LoRAConfig, folder: str, base: str, device: torch.device
) -> None:
    """Write `adapter_model.safetensors` (float32) and `adapter_config.json`. Collective; rank 0 writes.

    Args:
        base: what the base model is loaded by.
        device: where shards are gathered.
    """
    is_writer = dist.get_rank() == 0
    state = clean_state(model)
    adapters: dict[str, torch.Tensor] = {}
    gathers = []
    for weight, update in plan.updates.items():
        layer = weight.removesuffix(".weight")
        for leaf, name in (("lora_A", update.a), ("lora_B", update.b)):
            into = torch.empty(state[name].shape, dtype=torch.float32, device=device) if is_writer else None
            gathers.append(Gather(state[name], torch.float32, into))
            if into is not None:
                adapters[f"base_model.model.{layer}.{leaf}.weight"] = into
    gather_to_rank0(gathers, _MESSAGE_BYTES, device)
    if not is_writer:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = Path(folder) / "adapter_model.safetensors"
    save_file({name: tensor.cpu() for name, tensor in adapters.items()}, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors writes for the owner alone; who serves the adapter may be another user
    written = peft_config(plan.twin, [weight.removesuffix(".weight") for weight in plan.updates], config)
    written.base_model_name_or_path = base
    written.inference_mode = written.init_lora_weights = True
    written.target_modules = sorted(written.target_modules or ())  # peft keeps a set; two exports shall be equal
    written.save_pretrained(folder)
