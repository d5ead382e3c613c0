"""An engine as the sending trainer rank sees it: calls to its server, answered by plain futures."""

from concurrent.futures import Future
from dataclasses import dataclass

from nemo_rl.distributed.weight_transfer.buckets import BucketHeader
from nemo_rl.distributed.weight_transfer.receiver import GroupSpec
from nemo_rl.models.generation.sglang.engine_control import EngineControl
from nemo_rl.utils.threads import on_thread


@dataclass(frozen=True)
class HttpReceiver:
    """Implements `Receiver`. Picklable."""

    control: EngineControl
    takes_flattened: bool
    nccl_cumem_enable: str | None = None

    @property
    def name(self) -> str:
        return self.control.engine

    def join(self, group: GroupSpec, rank_offset: int, timeout_s: float) -> Future[None]:
        return on_thread(
            f"join {self.name}", lambda: self.control.init_weights_update_group(group, rank_offset, timeout_s)
        )

    def announce(self, header: BucketHeader, group_name: str, timeout_s: float) -> Future[None]:
        return on_thread(
            f"announce {self.name}", lambda: self.control.update_weights_from_distributed(header, group_name, timeout_s)
        )

    def leave(self, group_name: str, timeout_s: float) -> Future[None]:
        return on_thread(f"leave {self.name}", lambda: self.control.destroy_weights_update_group(group_name, timeout_s))
