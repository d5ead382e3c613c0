"""What the sender asks of an engine. Generation implements it; set-up hands it to the trainer ranks."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from nemo_rl.distributed.weight_transfer.buckets import BucketHeader


@dataclass(frozen=True)
class GroupSpec:
    """A weight-update group: trainer rank 0, then the ranks of every engine."""

    name: str
    backend: str
    """`nccl` or `gloo`."""
    master_address: str
    master_port: int
    world_size: int


class Receiver(Protocol):
    """One engine. Each call answers at once with a future that fails with the engine's own text."""

    @property
    def name(self) -> str:
        """No two engines of a run have the same, nor has an engine that of one it replaces."""
        ...

    @property
    def takes_flattened(self) -> bool:
        """Whether it takes a bucket as one flat buffer."""
        ...

    @property
    def nccl_cumem_enable(self) -> str | None:
        """`NCCL_CUMEM_ENABLE` where its ranks run; None: not set."""
        ...

    def join(self, group: GroupSpec, rank_offset: int, timeout_s: float) -> Future[None]:
        """Join as ranks `rank_offset, rank_offset + 1, ...`; done when the group has formed."""
        ...

    def announce(self, header: BucketHeader, group_name: str, timeout_s: float) -> Future[None]:
        """Receive and load one bucket; done when it is loaded."""
        ...

    def leave(self, group_name: str, timeout_s: float) -> Future[None]:
        """Forget the group."""
        ...
