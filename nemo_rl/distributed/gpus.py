"""Which of the GPUs that a process sees are the ones that Ray gave it.

Ray lets an actor see its own GPUs alone, so that its first is `cuda:0`. With
`RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES` it does not: every actor sees all GPUs of the node, and must pick its own.
"""

from collections.abc import Mapping, Sequence

import ray

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


def assigned_gpus() -> list[str]:
    """Numbers or UUIDs of the GPUs that Ray gave this actor, as its node names them; none outside an actor."""
    if not ray.is_initialized():
        return []
    return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", ())]


def local_gpu(visible: str | None, gpu: str) -> int:
    """CUDA's index of a GPU, in a process with `CUDA_VISIBLE_DEVICES=visible`; None: not set.

    Raises:
        ValueError: the process does not see it.
    """
    listed = [entry.strip() for entry in (visible or "").split(",")]
    if visible is None and gpu.isdecimal():
        return int(gpu)
    if gpu not in listed:
        shown = "unset" if visible is None else repr(visible)
        raise ValueError(f"{VISIBLE_VARIABLE}: got {shown}; must list GPU {gpu}, which Ray gave this process")
    return listed.index(gpu)


def own_gpu(environment: Mapping[str, str], gpus: Sequence[str]) -> int:
    """CUDA's index of the first of `gpus`; 0, the first that is visible, where Ray gave none."""
    return local_gpu(environment.get(VISIBLE_VARIABLE), gpus[0]) if gpus else 0


def visible_gpus(environment: Mapping[str, str], gpus: Sequence[str]) -> dict[str, str]:
    """What makes a child process see `gpus` alone; empty where Ray gave none: it then sees what its parent does.

    Raises:
        ValueError: this process does not see one of them.
    """
    for gpu in gpus:
        local_gpu(environment.get(VISIBLE_VARIABLE), gpu)
    return {VISIBLE_VARIABLE: ",".join(gpus)} if gpus else {}


def free_gpu_bytes(gpu: str) -> int:
    """Of a GPU by its number or UUID, without making a CUDA context in this process."""
    import pynvml  # of no use where there is no GPU

    pynvml.nvmlInit()
    by_number = gpu.isdecimal()
    handle = pynvml.nvmlDeviceGetHandleByIndex(int(gpu)) if by_number else pynvml.nvmlDeviceGetHandleByUUID(gpu)
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
