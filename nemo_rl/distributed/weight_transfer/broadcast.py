"""The sender: trainer rank 0 broadcasts bucket after bucket and watches the engines' answers."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from nemo_rl.distributed.weight_transfer.buckets import NamedTensor, flatten_bucket, make_header
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import ManifestError, TransferError
from nemo_rl.distributed.weight_transfer.manifest import Manifest
from nemo_rl.distributed.weight_transfer.process_group import WeightUpdateGroup
from nemo_rl.distributed.weight_transfer.receiver import Receiver

T = TypeVar("T")


@dataclass(frozen=True)
class RefitStats:
    """What one refit sent."""

    num_bytes: int = 0
    num_tensors: int = 0
    num_buckets: int = 0


class BucketSender:
    """Sends what the manifest holds, bucket by bucket, to every engine of one weight-update group."""

    def __init__(self, engines: Sequence[Receiver], group: WeightUpdateGroup, manifest: Manifest, deadline: Deadline):
        self._engines = engines
        self._group = group
        self._manifest = manifest
        self._sent: list[str] = []
        self._deadline = deadline
        self._flattened = all(engine.takes_flattened for engine in engines)
        self.stats = RefitStats()

    def send(self, bucket: list[NamedTensor]) -> None:
        """Announce, broadcast, await every engine's answer.

        Raises:
            ManifestError: the bucket is not what was planned; nothing of it is sent.
            TransferError: an engine refused the bucket, or failed while loading it.
            TimeoutError: no answer within the deadline.
        """
        for name, tensor in bucket:
            self._manifest.check(name, tensor)
        header = make_header(self.stats.num_buckets, bucket, flattened=self._flattened)
        left_s = self._deadline.require(header.describe())
        answers = {engine.announce(header, self._group.spec.name, left_s): engine for engine in self._engines}
        payload = [flatten_bucket(bucket)] if self._flattened else [tensor for _, tensor in bucket]
        works = [self._group.broadcast(tensor) for tensor in payload]
        # An engine answers after it has received and loaded. One that refuses before receiving would leave a wait on
        # the broadcast without end, so the answers come first.
        done, pending = wait(answers, timeout=self._deadline.remaining_s(), return_when=FIRST_EXCEPTION)
        for future in done:
            if (error := future.exception()) is not None:
                raise TransferError(f"{answers[future].name} failed at {header.describe()}: {error}") from error
        if pending:
            names = [answers[future].name for future in pending]
            raise TimeoutError(f"{names} did not answer for {header.describe()} in {self._deadline.timeout_s:g} s")
        for work in works:
            work.wait(timedelta(seconds=self._deadline.require(header.describe())))
        self._sent += header.names
        self.stats = RefitStats(
            num_bytes=self.stats.num_bytes + sum(tensor.nbytes for _, tensor in bucket),
            num_tensors=self.stats.num_tensors + len(bucket),
            num_buckets=self.stats.num_buckets + 1,
        )

    def finish(self) -> None:
        """Raise ManifestError unless everything planned has been sent, each tensor once."""
        self._manifest.check_complete(self._sent)


def broadcast_hf_buckets_via_distributed_impl(
    *, bucket_iterator: Iterable[list[NamedTensor]], sender: BucketSender | None
) -> RefitStats:
    """Drain the iterator on every rank; send on the rank that has a sender (rank 0).

    The iterator is collective: a rank that stopped walking would leave the others in a gather. So rank 0 keeps walking
    after a failure, and one exchange at the end makes every rank return, or every rank raise the same error.

    Raises:
        TransferError: on every rank, with rank 0's reason.
    """
    failure: Exception | None = None
    for bucket in bucket_iterator:
        if sender is None or failure is not None:
            continue
        try:
            sender.send(bucket)
        except Exception as error:  # noqa: BLE001 whatever it is, the other ranks' next gather needs this rank
            failure = error
    if sender is not None and failure is None:
        try:
            sender.finish()
        except ManifestError as error:
            failure = error
    reason, stats = _share_from_rank0((str(failure) if failure else None, sender.stats if sender else RefitStats()))
    if reason is not None:
        raise TransferError(reason) from failure
    return stats


def on_rank0(action: Callable[[], T]) -> T | None:
    """Run `action` on rank 0 alone; every rank returns (rank 0 the result, others None), or every rank raises.

    Raises:
        TransferError: on every rank, with rank 0's reason.
    """
    failure: Exception | None = None
    result: T | None = None
    if dist.get_rank() == 0:
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 whatever it is, the other ranks wait for the outcome
            failure = error
    reason = _share_from_rank0(str(failure) if failure else None)
    if reason is not None:
        raise TransferError(reason) from failure
    return result


def _share_from_rank0(value: T) -> T:
    """Rank 0's picklable value, on every rank of the trainer's default group."""
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]
