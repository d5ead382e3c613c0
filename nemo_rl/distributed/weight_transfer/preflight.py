"""What both ends of a weight-update group must agree on before it is made."""

from collections.abc import Mapping, Sequence

from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.weight_transfer.receiver import Receiver
from nemo_rl.utils.network import check_interfaces

CUMEM_VARIABLE = "NCCL_CUMEM_ENABLE"
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_CUMEM_DEFAULT = "-2"
"""NCCL asks the driver. What it finds differs from machine to machine, so this equals neither 0 nor 1."""


def shared_environment(driver: Mapping[str, str]) -> dict[str, str]:
    """What trainer ranks and engines get from the driver, so that both ends have it, on whatever node they start."""
    # SGLang sets 0 where it finds nothing.
    cumem = {CUMEM_VARIABLE: driver.get(CUMEM_VARIABLE) or "0"}
    return cumem | {name: driver[name] for name in _ALLOCATOR_VARIABLES if name in driver}


def check_ends(engines: Sequence[Receiver], backend: str, environment: Mapping[str, str]) -> None:
    """Look at what gloo and NCCL read from the environment: this one, and that of each engine.

    Raises:
        TransferError: `NCCL_CUMEM_ENABLE` differs, and the backend is nccl: names both values.
        ValueError: `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME` fits no interface of this machine.
    """
    check_interfaces(environment)
    if backend != "nccl":
        return
    own = environment.get(CUMEM_VARIABLE)
    differing = [engine for engine in engines if _cumem(engine.nccl_cumem_enable) != _cumem(own)]
    if differing:
        theirs = ", ".join(f"{_shown(engine.nccl_cumem_enable)} at {engine.name}" for engine in differing)
        raise TransferError(
            f"{CUMEM_VARIABLE}: {_shown(own)} at the trainer, {theirs}; NCCL fails or hangs unless it is the same at both "
            f"ends: export it as 0 or 1 before the run starts (--enable-symm-mem in extra_args needs 1)"
        )


def _cumem(value: str | None) -> str:
    """Unset and the default are one."""
    return value or _CUMEM_DEFAULT


def _shown(value: str | None) -> str:
    return "unset" if value is None else repr(value)
