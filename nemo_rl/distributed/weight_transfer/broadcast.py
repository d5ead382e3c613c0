"""The sender: trainer rank 0 broadcasts bucket after bucket and watches the engines' answers."""

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from dataclasses import astuple, dataclass

from nemo_rl.distributed.weight_transfer.buckets import BucketHeader, NamedTensor, flatten_bucket, make_header
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import ManifestError, TransferError, TransferFacts
from nemo_rl.distributed.weight_transfer.manifest import Manifest
from nemo_rl.distributed.weight_transfer.process_group import WeightUpdateGroup
from nemo_rl.distributed.weight_transfer.rank_exchange import Outcome, RankExchange, as_transfer_error, settle
from nemo_rl.distributed.weight_transfer.receiver import Receiver
from nemo_rl.distributed.weight_transfer.rollout_engines import abandon

_REFUSE_S = 0.2
"""For an engine to refuse a group's first bucket before NCCL makes its communicator (see `WeightUpdateGroup`)."""
_SAY_WHY_S = 2.0
"""For an engine to say why its connection broke."""
_ARRIVE_S = 60.0
"""Between an engine's answer and the arrival on its device: NCCL's is no more than the rest of one bucket."""
_RAISED_S = 2.0
"""How long a rank that cannot walk on waits to hear from the others, before its error ends them all."""


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
        self._abandoned = False
        self.announced: tuple[str, ...] = ()
        """Names of the engines that may hold new weights: all, once a bucket has been announced."""
        self.stats = RefitStats()

    def send(self, bucket: list[NamedTensor]) -> None:
        """Announce, broadcast, await every engine's answer.

        Raises:
            ManifestError: the bucket is not what was planned; nothing of it is sent.
            TransferError: an engine refused the bucket, failed while loading it, or did not answer in time.
        """
        for name, tensor in bucket:
            self._manifest.check(name, tensor)
        header = make_header(self.stats.num_buckets, bucket, flattened=self._flattened)
        left_s = self._deadline.remaining_s()
        if not left_s:
            raise self._failure(header, f"{header.describe()}: not sent within {self._deadline.timeout_s:g} s")
        payload = [flatten_bucket(bucket)] if self._flattened else [tensor for _, tensor in bucket]
        self.announced = tuple(engine.name for engine in self._engines)
        answers = {engine.announce(header, self._group.spec.name, left_s): engine for engine in self._engines}
        if self._group.spec.backend == "nccl" and not self._group.has_sent:
            wait(answers, timeout=_REFUSE_S, return_when=FIRST_EXCEPTION)
            self._raise_refusal(header, answers)
        self._await(header, answers, self._group.send(payload, left_s + _ARRIVE_S))
        self._sent += header.names
        self.stats = RefitStats(
            num_bytes=self.stats.num_bytes + sum(tensor.nbytes for _, tensor in bucket),
            num_tensors=self.stats.num_tensors + len(bucket),
            num_buckets=self.stats.num_buckets + 1,
        )

    def finish(self) -> None:
        """Raise ManifestError unless everything planned has been sent, each tensor once."""
        self._manifest.check_complete(self._sent)

    def abandon(self) -> None:
        """Nothing more will be sent: end the connections, so that no engine waits. Idempotent."""
        if not self._abandoned:
            self._abandoned = True
            abandon(self._engines, self._group)

    def _await(self, header: BucketHeader, answers: dict[Future[None], Receiver], sent: Future[None]) -> None:
        """An engine that refuses before it has received leaves the broadcast without end: all is watched at once."""
        self._watch(set(answers), sent)
        self._raise_refusal(header, answers)
        if sent.done() and (error := sent.exception()) is not None:
            raise self._failure(header, f"the broadcast of {header.describe()} broke off: {error}") from error
        names = [engine.name for future, engine in answers.items() if not future.done()]
        within = f"within {self._deadline.timeout_s:g} s"
        if names:
            what = f"{', '.join(names)} did not answer for {header.describe()} {within}"
            raise self._failure(header, what, names[0] if len(names) == 1 else None)
        if not sent.done():
            what = f"every engine says that it has loaded {header.describe()}, yet the broadcast is not done"
            raise self._failure(header, what)

    def _raise_refusal(self, header: BucketHeader, answers: dict[Future[None], Receiver]) -> None:
        for future, engine in answers.items():
            if future.done() and (error := future.exception()) is not None:
                what = f"{engine.name} failed at {header.describe()}: {error}"
                raise self._failure(header, what, engine.name, str(error)) from error

    def _watch(self, answers: set[Future[None]], sent: Future[None]) -> None:
        """Return when all is done, or something failed, or the time is over."""
        pending, broken = {sent, *answers}, False
        while pending and not broken:
            limit_s = self._deadline.remaining_s()
            done, pending = wait(
                pending,
                timeout=limit_s if pending & answers else min(_ARRIVE_S, limit_s),
                return_when=FIRST_COMPLETED,
            )
            broken = not done or any(future.exception() is not None for future in done)
        if sent.done() and sent.exception() is not None:
            wait(answers, timeout=min(_SAY_WHY_S, self._deadline.remaining_s()), return_when=FIRST_EXCEPTION)

    def _failure(
        self, header: BucketHeader, what: str, engine: str | None = None, engine_text: str | None = None
    ) -> TransferError:
        tensors = (header.names[0], header.names[-1])
        facts = TransferFacts(engine=engine, bucket=header.index, tensors=tensors, engine_text=engine_text)
        return TransferError(what, facts).touching(self.announced)


def broadcast_hf_buckets_via_distributed_impl(
    *,
    bucket_iterator: Iterable[list[NamedTensor]],
    rollout_engines: Sequence[Receiver],
    sender: BucketSender | None,
    exchange: RankExchange,
    deadline: Deadline,
) -> RefitStats:
    """Drain the iterator on every rank; send on the rank that has a sender (rank 0).

    The iterator is collective: a rank that stopped walking would leave the others in a gather. So rank 0 keeps walking
    after a failure, and one exchange at the end makes every rank return, or every rank raise the same error. A rank whose
    iterator itself raises cannot walk on: it says so and raises, and its caller ends the ranks that are in a gather.

    Raises:
        TransferError: on every rank, with the failures in rank order; the group has then ended.
    """
    failure: Exception | None = None
    walked = False
    try:
        failure = _walk(bucket_iterator, sender)
        walked = True
    except Exception as error:  # noqa: BLE001 whatever it is, the other ranks are told
        failure = error
    if sender is not None and failure is not None:
        sender.abandon()
    outcome = Outcome(
        error=as_transfer_error(failure, exchange.rank) if failure is not None else None,
        announced=sender.announced if sender else (),
        sent=astuple(sender.stats) if sender else (0, 0, 0),
    )
    engines = tuple(engine.name for engine in rollout_engines)
    try:
        rank0 = settle(exchange, outcome, deadline, engines, follow_s=0.0 if walked else _RAISED_S)
    except TransferError:
        if sender is not None:
            sender.abandon()
        raise
    return RefitStats(*rank0.sent)


def _walk(bucket_iterator: Iterable[list[NamedTensor]], sender: BucketSender | None) -> Exception | None:
    """Walk to the end; returns why sending stopped."""
    failure: Exception | None = None
    for bucket in bucket_iterator:
        if sender is None or failure is not None:
            continue
        try:
            sender.send(bucket)
        except Exception as error:  # noqa: BLE001 whatever it is, the other ranks' next gather needs this rank
            # Its frames hold the bucket.
            failure = error.with_traceback(None)
            sender.abandon()
    if sender is not None and failure is None:
        try:
            sender.finish()
        except ManifestError as error:
            failure = error
    return failure
