"""Lets the SGLang server run on plain PyTorch where there is no CUDA.

SGLang calls `activate` in each of its processes, through the entry-point group `sglang.srt.platforms`. The platform
class has its own module: it imports what only SGLang versions with CPU support have.
"""

import torch


def activate() -> str | None:
    """Name the platform class, or None where CUDA is available and SGLang's own platform is right."""
    if torch.cuda.is_available():
        return None
    return "nemo_rl.models.generation.sglang.plain_torch_platform:PlainTorchPlatform"
