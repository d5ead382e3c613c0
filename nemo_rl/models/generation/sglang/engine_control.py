"""What a server is told over HTTP beside requests: by the driver, and by trainer rank 0 about buckets and their group."""

from typing import Any
from weakref import WeakValueDictionary

from nemo_rl.distributed.weight_transfer.buckets import BucketHeader
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.receiver import GroupSpec
from nemo_rl.models.generation.sglang.http_client import EngineClient


class EngineControl(EngineClient):
    """Picklable: a process has one per server, with its connections, as long as it holds it."""

    def __reduce__(self) -> Any:
        return _own, (self.name, self.url, self._timeout_s, self._keys)

    def init_weights_update_group(self, group: GroupSpec, rank_offset: int, timeout_s: float | None = None) -> None:
        """Join the group; blocks until all its ranks have."""
        body = {
            "master_address": group.master_address,
            "master_port": group.master_port,
            "rank_offset": rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        self.post("/init_weights_update_group", body, timeout_s)

    def destroy_weights_update_group(self, group_name: str, timeout_s: float | None = None) -> None:
        self.post("/destroy_weights_update_group", {"group_name": group_name}, timeout_s)

    def begin_weight_update(self, timeout_s: float | None = None) -> None:
        """Open the session that updates need; nothing to do where the server has none."""
        if self.capabilities.weight_update_session:
            self.post("/begin_weight_update", {}, timeout_s)

    def end_weight_update(self, timeout_s: float | None = None) -> None:
        if self.capabilities.weight_update_session:
            self.post("/end_weight_update", {}, timeout_s)

    def update_weights_from_distributed(
        self, header: BucketHeader, group_name: str, timeout_s: float | None = None
    ) -> None:
        """Receive one bucket and load it; returns when both are done. The version stays: a bucket is not yet a model."""
        body: dict[str, Any] = {
            "names": header.names,
            "dtypes": header.dtypes,
            "shapes": header.shapes,
            "group_name": group_name,
            "flush_cache": False,
        }
        if header.flattened:
            body["load_format"] = "flattened_bucket"  # one uint8 broadcast; otherwise one per tensor
        self.post("/update_weights_from_distributed", body, timeout_s)

    def update_weights_from_disk(self, folder: str, timeout_s: float | None = None) -> None:
        """Load a Hugging Face folder and flush the cache."""
        self.post("/update_weights_from_disk", {"model_path": folder}, timeout_s)

    def pause_generation(self, mode: str, timeout_s: float | None = None) -> None:
        """`mode`: `retract` (running requests go back to the queue) or `abort` (they return what they have)."""
        self.post("/pause_generation", {"mode": mode}, timeout_s)

    def continue_generation(self, timeout_s: float | None = None) -> None:
        self.post("/continue_generation", {}, timeout_s)

    def invalidate_kv_cache(self, timeout_s: float | None = None) -> None:
        """Flush the cache; the engine must be idle or paused."""
        self.post("/flush_cache", {}, timeout_s)

    def pause_and_flush(self, mode: str, timeout_s: float) -> None:
        """`pause_generation`, then `invalidate_kv_cache`."""
        limit = Deadline(timeout_s)
        self.pause_generation(mode, limit.require("/pause_generation"))
        self.invalidate_kv_cache(limit.require("/flush_cache"))

    def update_weight_version(self, version: str, timeout_s: float | None = None) -> None:
        """Set the version that samples report, without touching requests."""
        body = {"new_version": version, "abort_all_requests": False}
        self.post("/update_weight_version", body, timeout_s)

    def weight_version(self) -> str:
        return str(self.get("/model_info")["weight_version"])


_known: WeakValueDictionary[tuple[Any, ...], EngineControl] = WeakValueDictionary()


def _own(*arguments: Any) -> EngineControl:
    """That of this process: each refit brings the engines anew, and their connections last."""
    control = _known.get(arguments)
    if control is None:
        control = _known[arguments] = EngineControl(*arguments)
    return control
