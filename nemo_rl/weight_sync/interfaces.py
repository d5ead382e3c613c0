"""The contract between the training loop and the refit."""

from abc import ABC, abstractmethod
from typing import Any


class WeightSynchronizer(ABC):
    """Brings the generation engines to the policy's weights. Lives on the driver; called by it alone.

    Order: `init_communicator` once, then `sync_weights` before the first rollout and after every training step,
    `shutdown` at the end. After `sync_weights` returns, every engine serves the policy's weights under one new
    version and generation runs. After it raises, `is_stale` is true, the version has not moved, and generation stays
    paused: the engines may hold a part of the new weights.
    """

    @property
    @abstractmethod
    def is_stale(self) -> bool:
        """Whether the engines do not hold the policy's current weights."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Successful refits so far; what the engines' samples report."""

    @abstractmethod
    def mark_stale(self) -> None:
        """The policy has trained since the last refit."""

    @abstractmethod
    def init_communicator(self) -> None:
        """Decide the bucket size and connect trainer rank 0 with every engine."""

    @abstractmethod
    def sync_weights(self, *, timer: Any = None, kv_scales: Any = None) -> None:
        """Send every weight to every engine, all or nothing."""

    @abstractmethod
    def restore_engines(self) -> None:
        """Replace engines that were lost since the last refit; all then serve the same weights and version as before."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Of the last refit: `refit/bytes`, `refit/buckets`, `refit/tensors`, `refit/weight_version`, `refit/recoveries`,
        `refit/megabytes_per_s` (10^6 bytes, from the first gather to the last load).
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Leave the weight-update group. Idempotent."""
