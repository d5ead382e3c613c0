"""The sender's end of the wire: one bucket at a time to every engine, and all that an engine may do to it."""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from threading import Lock

import torch

from nemo_rl.distributed.weight_transfer.buckets import BucketHeader, NamedTensor, flatten_bucket, make_header
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError, TransferFacts
from nemo_rl.distributed.weight_transfer.manifest import Manifest
from nemo_rl.distributed.weight_transfer.process_group import WeightUpdateGroup, event_now
from nemo_rl.distributed.weight_transfer.receiver import Receiver
from nemo_rl.distributed.weight_transfer.rollout_engines import abandon
from nemo_rl.distributed.weight_transfer.timeline import Span, Timeline

_REFUSE_S = 0.2
"""For an engine to refuse a group's first bucket before NCCL makes its communicator (see `WeightUpdateGroup`)."""
_SAY_WHY_S = 2.0
"""For an engine to say why its connection broke."""
_ARRIVE_S = 60.0
"""Between an engine's answer and the arrival on its device: NCCL's is no more than the rest of one bucket."""


@dataclass(frozen=True)
class RefitStats:
    """What one refit sent."""

    num_bytes: int = 0
    num_tensors: int = 0
    num_buckets: int = 0
    spans: tuple[Span, ...] = ()
    """On trainer rank 0 alone."""


@dataclass(frozen=True)
class PreparedBucket:
    """All that is left to do is to send it."""

    header: BucketHeader
    payload: list[torch.Tensor]
    num_bytes: int
    ready: torch.cuda.Event | None
    """What the current stream has done when the bucket is complete; None on the CPU."""


@dataclass(frozen=True)
class _Announcement:
    """One bucket that engines were told of, and their answers."""

    header: BucketHeader
    answers: dict[Future[None], Receiver]

    def pending(self) -> list[Future[None]]:
        return [answer for answer in self.answers if not answer.done()]


@dataclass(frozen=True)
class _Sending:
    """The bucket that was broadcast last, which may have arrived."""

    header: BucketHeader
    sent: Future[None]


class BucketSender:
    """Sends what the manifest holds, bucket by bucket, to every engine of one weight-update group.

    A bucket is announced when every engine rank is known to receive or to have received the one before: of two announcements
    under way an engine may read the second first, and would take the bytes of one for those of the other. Mostly the end of
    rank 0's broadcast shows it (`WeightUpdateGroup.shows_arrival`), and engines load one bucket while they are told of the
    next; otherwise their answers do.
    """

    def __init__(
        self,
        engines: Sequence[Receiver],
        group: WeightUpdateGroup,
        manifest: Manifest,
        deadline: Deadline,
        timeline: Timeline | None = None,
    ):
        self._engines = engines
        self._group = group
        self._manifest = manifest
        self._sent: list[str] = []
        self._deadline = deadline
        self._flattened = all(engine.takes_flattened for engine in engines)
        self._outstanding: list[_Announcement] = []
        self._sending: _Sending | None = None
        self._max_outstanding = 1
        """Buckets that may still be loading when the next is announced."""
        self._abandoned = False
        self._num_prepared = 0
        self._timeline = timeline or Timeline(torch.device("cpu"))
        self.announced: tuple[str, ...] = ()
        """Names of the engines that may hold new weights: all, once a bucket has been announced."""
        self.stats = RefitStats()

    def prepare(self, bucket: list[NamedTensor]) -> PreparedBucket:
        """What can be done while the bucket before is under way.

        Raises:
            ManifestError: the bucket is not what was planned.
            TransferError: rank 0 could not make it; its iterator says why at its end.
        """
        for name, tensor in bucket:
            self._manifest.check(name, tensor)
            if tensor.is_meta:
                raise TransferError(f"{name} was not made")
        header = make_header(self._num_prepared, bucket, flattened=self._flattened)
        self._num_prepared += 1
        payload = [flatten_bucket(bucket)] if self._flattened else [tensor for _, tensor in bucket]
        return PreparedBucket(header, payload, sum(tensor.nbytes for tensor in payload), event_now(payload[0]))

    def send(self, bucket: PreparedBucket) -> None:
        """When every engine rank receives the bucket before, announce this one and start to broadcast it.

        Whether it arrives and is loaded is heard later: in the next call, or in `finish`.

        Raises:
            TransferError: an engine refused a bucket, failed while loading one, or did not answer in time; or the broadcast
                of the one before broke off.
        """
        header = bucket.header
        self._await(max_outstanding=self._max_outstanding)
        left_s = self._deadline.remaining_s()
        if not left_s:
            raise self._failure(header, f"{header.describe()}: not sent within {self._deadline.timeout_s:g} s")
        start_s = self._timeline.now_s()
        answers = self._announce(header, left_s)
        if self._group.spec.backend == "nccl" and not self._group.has_sent:
            wait(answers, timeout=_REFUSE_S, return_when=FIRST_EXCEPTION)
            self._raise_refusal()
        sent = self._group.send(bucket.payload, left_s + _ARRIVE_S, bucket.ready)
        self._sending = _Sending(header, sent)
        self._max_outstanding = 1 if self._group.shows_arrival(bucket.payload) else 0
        _add_spans(self._timeline, header.index, start_s, sent, answers)
        self._sent += header.names
        self.stats = RefitStats(
            num_bytes=self.stats.num_bytes + bucket.num_bytes,
            num_tensors=self.stats.num_tensors + len(header.names),
            num_buckets=self.stats.num_buckets + 1,
        )

    def finish(self) -> None:
        """Return when every engine has loaded all that was sent.

        Raises:
            ManifestError: something planned has not been sent, or twice.
            TransferError: as `send`.
        """
        self._await(max_outstanding=0)
        self._manifest.check_complete(self._sent)

    def spans(self) -> tuple[Span, ...]:
        return self._timeline.spans()

    def abandon(self) -> None:
        """Nothing more will be sent: end the connections, so that no engine waits. Idempotent."""
        if not self._abandoned:
            self._abandoned = True
            abandon(self._engines, self._group)

    def _announce(self, header: BucketHeader, left_s: float) -> list[Future[None]]:
        self.announced = tuple(engine.name for engine in self._engines)
        answers = {engine.announce(header, self._group.spec.name, left_s): engine for engine in self._engines}
        self._outstanding.append(_Announcement(header, answers))
        return list(answers)

    def _await(self, *, max_outstanding: int) -> None:
        """Wait until the last broadcast has ended, and so many buckets at most are not loaded.

        An engine that refuses before it has received leaves the broadcast without end: all is watched at once.
        """
        while True:
            # Looked at before refusals are: an answer that fails in between is heard now or in the next round.
            outstanding = [announcement for announcement in self._outstanding if announcement.pending()]
            self._raise_refusal()
            self._outstanding = outstanding
            if self._sending is not None and self._sending.sent.done():
                self._raise_broken(self._sending)
                self._sending = None
            if self._sending is None and len(self._outstanding) <= max_outstanding:
                return
            answers = [answer for announcement in self._outstanding for answer in announcement.pending()]
            limit_s = self._deadline.remaining_s()
            done, _ = wait(
                [*answers, self._sending.sent] if self._sending is not None else answers,
                timeout=limit_s if answers else min(_ARRIVE_S, limit_s),
                return_when=FIRST_COMPLETED,
            )
            if not done:
                self._raise_late()

    def _raise_refusal(self) -> None:
        for announcement in self._outstanding:
            for future, engine in announcement.answers.items():
                if future.done() and (error := future.exception()) is not None:
                    what = f"{engine.name} failed at {announcement.header.describe()}: {error}"
                    raise self._failure(announcement.header, what, engine.name, str(error)) from error

    def _raise_broken(self, sending: _Sending) -> None:
        """If the broadcast broke off; an engine may say why."""
        if (error := sending.sent.exception()) is None:
            return
        answers = [answer for announcement in self._outstanding for answer in announcement.pending()]
        wait(answers, timeout=min(_SAY_WHY_S, self._deadline.remaining_s()), return_when=FIRST_EXCEPTION)
        self._raise_refusal()
        what = f"the broadcast of {sending.header.describe()} broke off: {error}"
        raise self._failure(sending.header, what) from error

    def _raise_late(self) -> None:
        for announcement in self._outstanding:
            header, late = announcement.header, [announcement.answers[answer].name for answer in announcement.pending()]
            if late:
                what = f"{', '.join(late)} did not answer for {header.describe()} within {self._deadline.timeout_s:g} s"
                raise self._failure(header, what, late[0] if len(late) == 1 else None)
        if self._sending is not None:
            header = self._sending.header
            what = f"every engine says that it has loaded {header.describe()}, yet the broadcast is not done"
            raise self._failure(header, what)

    def _failure(
        self, header: BucketHeader, what: str, engine: str | None = None, engine_text: str | None = None
    ) -> TransferError:
        tensors = (header.names[0], header.names[-1])
        facts = TransferFacts(engine=engine, bucket=header.index, tensors=tensors, engine_text=engine_text)
        return TransferError(what, facts).touching(self.announced)


def _add_spans(
    timeline: Timeline, bucket: int, start_s: float, sent: Future[None], answers: Sequence[Future[None]]
) -> None:
    """Of one bucket, on the threads that see the end of the broadcast and the last answer."""
    left, lock, arrived_s = len(answers) + 1, Lock(), start_s

    def add_broadcast(_: Future[None]) -> None:
        nonlocal arrived_s
        arrived_s = timeline.now_s()
        timeline.add("broadcast", bucket, start_s, arrived_s)

    def count(_: Future[None]) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            timeline.add("load", bucket, arrived_s, timeline.now_s())

    sent.add_done_callback(add_broadcast)
    for future in (sent, *answers):
        future.add_done_callback(count)
