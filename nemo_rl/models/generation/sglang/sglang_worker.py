"""One engine: starts its SGLang server and ends it. Becomes a Ray actor in setup."""

import os
from pathlib import Path

import psutil
import ray

from nemo_rl.config.schema import PolicyConfig
from nemo_rl.distributed.gpus import assigned_gpus, free_gpu_bytes, visible_gpus
from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.server_args import NCCL_CUMEM, ServerPlace, build_command, build_environment
from nemo_rl.models.generation.sglang.server_process import ServerProcess, start_on_free_ports
from nemo_rl.utils.network import check_interfaces, interface_of, resolve_host


class SGLangGenerationWorker:
    """Methods may be called from several threads at once."""

    def __init__(
        self,
        *,
        cfg: PolicyConfig,
        engine_index: int,
        model_folder: str,
        tokenizer_folder: str | None,
        device: str,
        log_dir: str,
        host: str | None,
        keys: AccessKeys,
        shares_gpu: bool = False,
        meets_rank0: bool = False,
    ) -> None:
        """Start nothing yet.

        Args:
            host: name or address that the server binds to; None: the address of this node in the Ray cluster.
            keys: of the run.
            shares_gpu: with a trainer rank.
            meets_rank0: that rank may be the one that sends.

        Raises:
            ValueError: nobody knows `host`, or `CUDA_VISIBLE_DEVICES` hides a GPU that Ray gave this actor.
        """
        self._cfg = cfg
        self._server_cfg = cfg.generation.sglang_cfg.sglang_server_config
        self._engine_index = engine_index
        self._model_folder = model_folder
        self._tokenizer_folder = tokenizer_folder
        self._device = device
        self._shares_gpu = shares_gpu
        self._log_file = Path(log_dir) / f"sglang_engine_{engine_index}.log"
        self._host = resolve_host(host or ray.util.get_node_ip_address())
        self._keys = keys
        self._environment = build_environment(
            {**os.environ, **visible_gpus(os.environ, assigned_gpus())},
            device=device,
            tp_size=self.num_gpus(),
            cores=sorted(os.sched_getaffinity(0)),
            interface=interface_of(self._host),
            extra_args=self._server_cfg.extra_args,
            meets_rank0=meets_rank0,
        )
        self._process: ServerProcess | None = None

    def start(self) -> str:
        """Start the server, wait until it is healthy, return its URL.

        Raises:
            ServerStartError: see `ServerProcess.wait_until_healthy`.
            ValueError: an environment variable names an interface that this machine lacks.
        """
        check_interfaces(self._environment)
        return start_on_free_ports(self._host, self._server_cfg.startup_timeout_s, self._launch).url

    def _launch(self, port: int, internal_port: int) -> ServerProcess:
        place = ServerPlace(
            model_folder=self._model_folder,
            tokenizer_folder=self._tokenizer_folder,
            device=self._device,
            host=self._host,
            port=port,
            internal_port=internal_port,
            engine_index=self._engine_index,
            shares_gpu=self._shares_gpu,
        )
        command = build_command(self._cfg, place)
        # Kept from the start, so that `shutdown` ends a server that is not healthy yet.
        self._process = ServerProcess(command, self._environment, self._log_file, self._host, port, self._keys)
        return self._process

    def shutdown(self) -> None:
        """End the server and everything it started. Idempotent."""
        if self._process is not None:
            self._process.stop()

    def num_gpus(self) -> int:
        """Slots of this engine: its ranks in a weight-update group."""
        return self._server_cfg.num_gpus_per_engine

    def pid(self) -> int:
        """Of the process that everything of the server descends from."""
        if self._process is None:
            raise AssertionError(f"engine {self._engine_index}: start() comes first")
        return self._process.pid

    def nccl_cumem_enable(self) -> str | None:
        """`NCCL_CUMEM_ENABLE` in the server's environment; never None, where SGLang would choose."""
        return self._environment[NCCL_CUMEM]

    def free_memory_bytes(self) -> int:
        """Of the host, or the least of the server's GPUs."""
        if self._device == "cpu":
            return int(psutil.virtual_memory().available)
        return min(free_gpu_bytes(gpu) for gpu in assigned_gpus())
