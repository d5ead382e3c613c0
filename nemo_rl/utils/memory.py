"""Memory that can still be taken."""

import psutil
import torch


def free_memory_bytes(device: str) -> int:
    """Of the host (`cpu`), or of the first visible GPU (`cuda`), without making a CUDA context in this process."""
    if device == "cpu":
        return int(psutil.virtual_memory().available)
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda._get_nvml_device_index(0))
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
