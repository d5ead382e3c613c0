"""The buckets of one refit, of which the first is made at once."""

from collections.abc import Iterable, Iterator

from nemo_rl.distributed.weight_transfer.buckets import NamedTensor, iter_named_tensor_buckets
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.manifest import Manifest
from nemo_rl.distributed.weight_transfer.timeline import Timeline


class RefitWalk:
    """To be walked once, on every rank. What making the first bucket raises is raised by the walk."""

    def __init__(
        self,
        tensors: Iterable[NamedTensor],
        buffer_size_bytes: int,
        manifest: Manifest,
        timeline: Timeline,
        deadline: Deadline,
    ) -> None:
        self.manifest = manifest
        self.timeline = timeline
        self.deadline = deadline
        """Of the refit, from when the first bucket was asked for."""
        self._buckets = iter_named_tensor_buckets(tensors, buffer_size_bytes, manifest)
        self._first: list[NamedTensor] | None = None
        self._failure: Exception | None = None
        try:
            self._first = next(self._buckets, None)
        except Exception as error:  # noqa: BLE001 whatever it is, the ranks tell one another in the walk
            self._failure = error

    def __iter__(self) -> Iterator[list[NamedTensor]]:
        if self._failure is not None:
            raise self._failure
        if self._first is not None:
            yield self._first
        yield from self._buckets
