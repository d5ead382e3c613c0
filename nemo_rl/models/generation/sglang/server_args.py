"""The SGLang server's command line and environment, as pure functions of the configuration."""

import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_rl.config.schema import PolicyConfig
from nemo_rl.utils.network import GLOO_VARIABLE

_CPU_FLAGS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--disable-cuda-graph",
    "--disable-overlap-schedule",
    # An idle scheduler spins on a core that the trainer needs.
    "--sleep-on-idle",
    "--skip-server-warmup",
)
_DROPPED_VARIABLES = (
    # Byte code halves the start.
    "PYTHONDONTWRITEBYTECODE",
    # Log-probs must be those of the sampling temperature.
    "SGLANG_RETURN_ORIGINAL_LOGPROB",
    # Selects a CPU path that wants a special kernel build.
    "SGLANG_USE_CPU_ENGINE",
    # Capabilities are read from /openapi.json.
    "DISABLE_OPENAPI_DOC",
    # The ids of a prompt with a picture must come back as they were sent.
    "SGLANG_MM_AVOID_RETOKENIZE",
    # Other front ends than the one that asks for keys.
    "SGLANG_GRPC_PORT",
    "SGLANG_RUST_SERVER",
)
_SHARED_MEMORY_FRACTION = 0.4
"""Of a GPU's memory, for the weights and the cache of an engine that shares it."""
_KEPT_MEMORY_BYTES = 1 << 30
NCCL_CUMEM = "NCCL_CUMEM_ENABLE"
"""Variable that must have one value at both ends of a weight-update group."""
_SYMMETRIC_MEMORY = "--enable-sy"
"""`--enable-symm-mem`, which makes SGLang set that variable, or an abbreviation."""


@dataclass(frozen=True)
class ServerPlace:
    """Which model one server serves, and where."""

    model_folder: str
    tokenizer_folder: str | None
    """None: the model folder."""
    device: str
    """`cpu` or `cuda`."""
    host: str
    port: int
    internal_port: int
    """Given, so that the server does not probe for one; its ranks meet through a file instead (`server_supervisor`)."""
    engine_index: int
    shares_gpu: bool = False
    """With a trainer rank."""


def build_command(cfg: PolicyConfig, place: ServerPlace) -> list[str]:
    """The command that starts the server; the user's `extra_args` come last and win."""
    server = cfg.generation.sglang_cfg.sglang_server_config
    command = [sys.executable, "-m", "sglang.launch_server"]
    command += [f"--model-path={place.model_folder}"]
    if place.tokenizer_folder is not None:
        command += [f"--tokenizer-path={place.tokenizer_folder}"]
    command += [f"--host={place.host}", f"--port={place.port}", f"--nccl-port={place.internal_port}"]
    command += [f"--dtype={cfg.precision}", f"--tp-size={server.num_gpus_per_engine}"]
    # Engines with equal seeds would sample equal answers to equal prompts.
    command += [f"--random-seed={server.random_seed + place.engine_index}"]
    command += [f"--max-running-requests={server.sglang_server_concurrency}"]
    command += ["--weight-version=0", "--grammar-backend=none", "--log-level-http=warning"]
    if place.device == "cpu":
        command += [*_CPU_FLAGS, f"--max-total-tokens={_num_cache_tokens(cfg)}"]
    if place.shares_gpu:
        command += [f"--mem-fraction-static={_SHARED_MEMORY_FRACTION}"]
    return [*command, *server.extra_args]


def _num_cache_tokens(cfg: PolicyConfig) -> int:
    """KV cache for every request in flight at full length, and one more: SGLang keeps a few tokens for itself."""
    concurrency = cfg.generation.sglang_cfg.sglang_server_config.sglang_server_concurrency
    return (concurrency + 1) * cfg.max_total_sequence_length


def build_environment(
    base: Mapping[str, str],
    *,
    device: str,
    tp_size: int,
    cores: list[int],
    interface: str | None = None,
    extra_args: Sequence[str] = (),
    meets_rank0: bool = False,
) -> dict[str, str]:
    """The server's environment.

    Args:
        base: the worker's own.
        interface: that of the server's address, if known.
        extra_args: the user's arguments of the server.
        meets_rank0: on one GPU with the trainer rank that sends.
        cores: CPU cores that the server may use; on `cpu` shared out among its `tp_size` ranks.
    """
    environment = {name: value for name, value in base.items() if name not in _DROPPED_VARIABLES}
    # Model and tokenizer are local folders; a look-up at the hub would wait for a network that may not be there.
    environment["HF_HUB_OFFLINE"] = "1"
    if interface is not None:
        # gloo would listen where the machine's own name leads, which may be a network that the run does not use.
        environment.setdefault(GLOO_VARIABLE, interface)
    # Kept embeddings of pictures would outlive a refit: SGLang's flush forgets the KV cache alone.
    environment["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    # What SGLang itself sets when it finds nothing; said here so that the trainer's end can be compared with it.
    environment.setdefault(NCCL_CUMEM, "0")
    if any(argument.startswith(_SYMMETRIC_MEMORY) for argument in extra_args):
        environment[NCCL_CUMEM] = "1"
    if meets_rank0:
        # NCCL refuses two ranks on one GPU, but not those of two hosts.
        environment.setdefault("NCCL_HOSTID", f"engines of {socket.gethostname()}")
    if device != "cpu":
        return environment
    num_threads = max(1, len(cores) // tp_size)
    environment["OMP_NUM_THREADS"] = str(num_threads)
    # Threads that spin at each barrier take the cores from the trainer and from each other.
    environment["OMP_WAIT_POLICY"] = "PASSIVE"
    # Logits take megabytes; freed to the system, every page of them faults anew in each step.
    environment["MALLOC_MMAP_THRESHOLD_"] = environment["MALLOC_TRIM_THRESHOLD_"] = str(_KEPT_MEMORY_BYTES)
    # On a GPU machine this is what makes SGLang take the CPU.
    environment["CUDA_VISIBLE_DEVICES"] = ""
    if tp_size > 1:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(_cores_per_rank(cores, tp_size, num_threads))
    return environment


def _cores_per_rank(cores: list[int], tp_size: int, num_threads: int) -> list[str]:
    """Core lists as SGLang reads them; ranks share cores when there are more ranks than cores."""
    starts = [(rank * num_threads) % len(cores) for rank in range(tp_size)]
    return [",".join(str(core) for core in cores[start : start + num_threads]) for start in starts]
