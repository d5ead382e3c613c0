"""`torch.compile` of the transformer blocks, and whether this machine can do it."""

import os
import shlex
import shutil
from collections.abc import Sequence

import torch
from torch import nn

_COMPILERS = {"cpu": ("CXX", ("g++",)), "cuda": ("CC", ("gcc", "clang", "cc"))}
"""Device -> the variable that names the compiler, and what is called without it: by inductor, and by Triton."""

_MAX_GRAPHS = 32
"""Of one piece of code, after which torch runs it uncompiled: blocks of text and of pictures may share it, each with and
without gradient, with adapters and without, for one picture and for several. torch's own limit is 8."""


def check_compiler(device_type: str) -> None:
    """Raise ValueError where `torch.compile` would fail in the first forward pass."""
    variable, names = _COMPILERS[device_type]
    # The variable may hold options as well.
    wanted = tuple(shlex.split(os.environ.get(variable, ""))[:1]) or names
    if not any(shutil.which(name) for name in wanted):
        raise ValueError(
            "policy.dtensor_cfg.torch_compile: got true; allowed where there is a compiler; "
            f"on {device_type} one of {', '.join(wanted)} (or ${variable}) must be on the PATH"
        )


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each block's `forward` in place, so that no name changes.

    FSDP2's hooks stay outside of what is compiled: it sees gathered weights, as plain tensors. Shapes are symbols from
    the start, since nearly every micro-batch has a length of its own.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_GRAPHS)
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=True)
