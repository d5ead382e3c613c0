"""One engine: starts its SGLang server and passes calls on to it. Becomes a Ray actor in setup."""

import os
from pathlib import Path

import psutil
import ray

from nemo_rl.config.schema import PolicyConfig
from nemo_rl.distributed.gpus import assigned_gpus, free_gpu_bytes, visible_gpus
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.http_client import EngineClient, EngineError, ServerCapabilities
from nemo_rl.models.generation.sglang.server_args import NCCL_CUMEM, ServerPlace, build_command, build_environment
from nemo_rl.models.generation.sglang.server_process import ServerProcess, start_on_free_ports
from nemo_rl.utils.network import check_interfaces, interface_of, resolve_host


class SGLangGenerationWorker:
    """Methods may be called from several threads at once. All raise `EngineError` when the server refuses or fails."""

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
        self._client: EngineClient | None = None

    def start(self) -> str:
        """Start the server, wait until it is healthy, return its URL.

        Raises:
            ServerStartError: see `ServerProcess.wait_until_healthy`.
            ValueError: an environment variable names an interface that this machine lacks.
        """
        check_interfaces(self._environment)
        process = start_on_free_ports(self._host, self._server_cfg.startup_timeout_s, self._launch)
        name = f"engine {self._engine_index}"
        self._client = EngineClient(name, process.url, self._server_cfg.refit_timeout_s, self._keys)
        return process.url

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
        if self._client is not None:
            self._client.close()

    def num_gpus(self) -> int:
        """Slots of this engine: its ranks in a weight-update group."""
        return self._server_cfg.num_gpus_per_engine

    def url(self) -> str:
        return self._require_client().url

    def pid(self) -> int:
        """Of the process that everything of the server descends from."""
        if self._process is None:
            raise AssertionError(f"engine {self._engine_index}: start() comes first")
        return self._process.pid

    def nccl_cumem_enable(self) -> str | None:
        """`NCCL_CUMEM_ENABLE` in the server's environment; never None, where SGLang would choose."""
        return self._environment[NCCL_CUMEM]

    def free_memory_bytes(self, timeout_s: float | None = None) -> int:
        """Of the host, or the least of the server's GPUs."""
        if self._device == "cpu":
            return int(psutil.virtual_memory().available)
        return min(free_gpu_bytes(gpu) for gpu in assigned_gpus())

    def capabilities(self) -> ServerCapabilities:
        return self._require_client().capabilities

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float,
    ) -> None:
        """Join the group; blocks until all `world_size` ranks have."""
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        self._require_client().post("/init_weights_update_group", body, timeout_s)

    def destroy_weights_update_group(self, group_name: str, timeout_s: float | None = None) -> None:
        self._require_client().post("/destroy_weights_update_group", {"group_name": group_name}, timeout_s)

    def begin_weight_update(self, timeout_s: float | None = None) -> None:
        """Open the session that updates need; nothing to do where the server has none."""
        if self.capabilities().weight_update_session:
            self._require_client().post("/begin_weight_update", {}, timeout_s)

    def end_weight_update(self, timeout_s: float | None = None) -> None:
        if self.capabilities().weight_update_session:
            self._require_client().post("/end_weight_update", {}, timeout_s)

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        flush_cache: bool = False,
        weight_version: str | None = None,
        load_format: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Receive one bucket and load it; returns when both are done.

        Args:
            dtypes: such as `bfloat16`.
            load_format: `flattened_bucket` for one uint8 broadcast of all bytes; None for one per tensor.
            weight_version: None leaves the version; a bucket is not yet a model.
        """
        body = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": group_name,
            "flush_cache": flush_cache,
            "weight_version": weight_version,
            "load_format": load_format,
        }
        given = {key: value for key, value in body.items() if value is not None}
        self._require_client().post("/update_weights_from_distributed", given, timeout_s)

    def update_weights_from_disk(self, folder: str, timeout_s: float | None = None) -> None:
        """Load a Hugging Face folder and flush the cache."""
        self._require_client().post("/update_weights_from_disk", {"model_path": folder}, timeout_s)

    def pause_generation(self, mode: str, timeout_s: float | None = None) -> None:
        """`mode`: `retract` (running requests go back to the queue) or `abort` (they return what they have)."""
        self._require_client().post("/pause_generation", {"mode": mode}, timeout_s)

    def continue_generation(self, timeout_s: float | None = None) -> None:
        self._require_client().post("/continue_generation", {}, timeout_s)

    def invalidate_kv_cache(self, timeout_s: float | None = None) -> None:
        """Flush the cache; the engine must be idle or paused."""
        self._require_client().post("/flush_cache", {}, timeout_s)

    def pause_and_flush(self, mode: str, timeout_s: float | None = None) -> None:
        """`pause_generation` and `invalidate_kv_cache` in one call."""
        limit = Deadline(self._server_cfg.refit_timeout_s if timeout_s is None else timeout_s)
        self.pause_generation(mode, limit.require("/pause_generation"))
        self.invalidate_kv_cache(limit.require("/flush_cache"))

    def check_weights(self, action: str, timeout_s: float | None = None) -> dict[str, str]:
        """`checksum`: digest of every parameter, by `rank/name`; `snapshot`, `compare`, `reset_tensors`: no digests."""
        if action == "checksum":
            return self._require_client().checksums(timeout_s)
        self._require_client().post("/weights_checker", {"action": action}, timeout_s)
        return {}

    def update_weight_version(self, version: str, timeout_s: float | None = None) -> None:
        """Set the version that samples report, without touching requests."""
        body = {"new_version": version, "abort_all_requests": False}
        self._require_client().post("/update_weight_version", body, timeout_s)

    def weight_version(self) -> str:
        return str(self._require_client().get("/model_info")["weight_version"])

    def _require_client(self) -> EngineClient:
        if self._client is None:
            raise EngineError(f"engine {self._engine_index}", "start", None, "the server is not started")
        return self._client
