"""Vision-language families in tiny form, as the hub holds them."""

from functools import partial

import torch
from family import Family, Weights
from vision_configs import (
    NUM_EXPERTS,
    make_gemma3,
    make_llava,
    make_qwen2_5_vl,
    make_qwen2_vl,
    make_qwen3_5,
    make_qwen3_5_moe,
    make_qwen3_vl,
    make_qwen3_vl_moe,
)
from vision_processors import (
    write_gemma3_processor,
    write_llava_processor,
    write_qwen2_5_vl_processor,
    write_qwen2_vl_processor,
    write_qwen3_5_processor,
    write_qwen3_vl_processor,
)

from nemo_rl.models.tiny_vision_model import QWEN_IMAGE

_QWEN_IMAGE_PROMPT = f"look: {QWEN_IMAGE} what is it?"
# What `/health` would generate ends the server.


def _transpose_experts(weights: Weights) -> Weights:
    """Expert stacks `[experts, out, in]` as Qwen3-VL-MoE's checkpoints hold them: `[experts, in, out]`."""
    return {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in weights.items()
    }


def _stack_experts(weights: Weights) -> Weights:
    """Experts as Qwen3.5-MoE's checkpoints hold them: `gate_up_proj [experts, 2 x out, in]` and `down_proj`, stacked."""
    stacked = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for prefix in sorted({name.split(".experts.")[0] for name in weights if ".experts." in name}):
        gate, up, down = (
            torch.stack([weights[f"{prefix}.experts.{index}.{part}_proj.weight"] for index in range(NUM_EXPERTS)])
            for part in ("gate", "up", "down")
        )
        stacked[f"{prefix}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        stacked[f"{prefix}.experts.down_proj"] = down
    return stacked


def _nest_vision_tower(weights: Weights) -> Weights:
    """SigLIP's and CLIP's towers as checkpoints name them, one level deeper."""
    deep, flat = "vision_tower.vision_model.", "vision_tower."
    return {
        deep + name.removeprefix(flat) if name.startswith(flat) and not name.startswith(deep) else name: tensor
        for name, tensor in weights.items()
    }


VISION_FAMILIES: tuple[Family, ...] = (
    Family(
        "Qwen2-VL",
        "Qwen2VLForConditionalGeneration",
        make_qwen2_vl,
        image_prompt=_QWEN_IMAGE_PROMPT,
        write_tokenizer=write_qwen2_vl_processor,
    ),
    Family(
        "Qwen2.5-VL",
        "Qwen2_5_VLForConditionalGeneration",
        make_qwen2_5_vl,
        image_prompt=_QWEN_IMAGE_PROMPT,
        write_tokenizer=write_qwen2_5_vl_processor,
    ),
    Family(
        "Qwen3-VL, tied",
        "Qwen3VLForConditionalGeneration",
        partial(make_qwen3_vl, tied=True),
        image_prompt=_QWEN_IMAGE_PROMPT,
        write_tokenizer=write_qwen3_vl_processor,
    ),
    Family(
        "Qwen3-VL, untied",
        "Qwen3VLForConditionalGeneration",
        partial(make_qwen3_vl, tied=False),
        image_prompt=_QWEN_IMAGE_PROMPT,
        write_tokenizer=write_qwen3_vl_processor,
    ),
    Family(
        "Qwen3-VL-MoE",
        "Qwen3VLMoeForConditionalGeneration",
        make_qwen3_vl_moe,
        image_prompt=_QWEN_IMAGE_PROMPT,
        to_hub_layout=_transpose_experts,
        write_tokenizer=write_qwen3_vl_processor,
    ),
    Family(
        "Gemma3 VLM",
        "Gemma3ForConditionalGeneration",
        make_gemma3,
        server_args=("--enable-multimodal",),
        image_prompt="look: <start_of_image> what is it?",
        to_hub_layout=_nest_vision_tower,
        write_tokenizer=write_gemma3_processor,
    ),
    Family(
        "Qwen3.5",
        "Qwen3_5ForConditionalGeneration",
        make_qwen3_5,
        generates=False,
        image_prompt=_QWEN_IMAGE_PROMPT,
        write_tokenizer=write_qwen3_5_processor,
    ),
    Family(
        "Qwen3.5-MoE",
        "Qwen3_5MoeForConditionalGeneration",
        make_qwen3_5_moe,
        generates=False,
        image_prompt=_QWEN_IMAGE_PROMPT,
        to_hub_layout=_stack_experts,
        write_tokenizer=write_qwen3_5_processor,
    ),
    Family(
        "LLaVA",
        "LlavaForConditionalGeneration",
        make_llava,
        engine_starts=False,
        generates=False,
        image_prompt="look: <image> what is it?",
        to_hub_layout=_nest_vision_tower,
        write_tokenizer=write_llava_processor,
    ),
)
