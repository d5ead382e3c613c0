"""The SGLang platform for CPUs without SGLang's own CPU kernels."""

import gc
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class PlainTorchPlatform(CpuDeviceMixin, SRTPlatform):
    """Every operation falls back to its `forward_native`; no Triton, no graphs."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def empty_cache(self) -> None:
        """Young objects alone: a pass over all that a server has imported takes 0.7 s of every flush."""
        gc.collect(1)

    def init_backend(self) -> None:
        """Put the batched decode behind the name `torch_native`, which SGLang's own checks know."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        register_attention_backend("torch_native")(_create_attention_backend)
        # Linear attention puts its weights on this "device" (Qwen3-Next, Qwen3.5); without CUDA the call raises.
        torch.cuda.current_device = torch.cpu.current_device  # type: ignore[assignment]


def _create_attention_backend(model_runner: Any) -> Any:
    from nemo_rl.models.generation.sglang.batched_attention import BatchedDecodeAttnBackend

    return BatchedDecodeAttnBackend(model_runner)
