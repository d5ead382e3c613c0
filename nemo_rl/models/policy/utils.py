"""Leaf helpers of the policy: dtypes, the process group, free memory, transformer blocks."""

import os
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from nemo_rl.distributed.weight_transfer.process_group import open_store
from nemo_rl.utils.network import check_interfaces

PRECISION_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""`policy.precision` -> compute and wire dtype."""
TARGET_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""`target_precision` of a refit -> wire dtype."""


def init_process_group(
    *, device: torch.device, rank: int, world_size: int, master_addr: str, master_port: int, timeout_s: float
) -> None:
    """Make the trainers' default group: gloo for CPU tensors and, on cuda, NCCL for device tensors.

    The store is made here and not by a `tcp://` rendezvous, which under torchrun becomes a client without a server.
    No `device_id` is bound: a bound group makes torch split its communicator for each new group, a call that ranks
    outside the new group never make.

    Raises:
        ValueError: `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME` fits no interface of this machine.
    """
    check_interfaces(os.environ)
    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
        store = open_store(master_addr, timeout, port=master_port, world_size=world_size)
    else:
        store = dist.TCPStore(master_addr, master_port, world_size, is_master=False, timeout=timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def resolve_device(device: str, index: int = 0) -> torch.device:
    """`cpu`, or the GPU of this index, made current; raises ValueError for any other name."""
    if device == "cpu":
        return torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    raise ValueError(f"device: got {device!r}; allowed 'cpu', 'cuda'")


def free_memory_bytes(device: torch.device) -> int:
    """Memory that this process can still take: of its GPU, or of the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def find_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer blocks: those that the model class must not split, else the longest list of modules.

    Of blocks within blocks the outer ones: a block is sharded whole.
    """
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if blocks:
        inner = {id(part) for block in blocks for part in block.modules() if part is not block}
        return [block for block in blocks if id(block) not in inner]
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"policy.model_name: {type(model).__name__} has no list of transformer blocks to shard")
    return max(lists, key=len)
