"""A refit in the trainer: every rank makes bucket after bucket, rank 0 sends them."""

from collections.abc import Iterable, Sequence

from nemo_rl.distributed.weight_transfer.buckets import NamedTensor
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.weight_transfer.rank_exchange import Outcome, RankExchange, as_transfer_error, settle
from nemo_rl.distributed.weight_transfer.receiver import Receiver
from nemo_rl.distributed.weight_transfer.sender import BucketSender, RefitStats

_RAISED_S = 2.0
"""How long a rank that cannot walk on waits to hear from the others, before its error ends them all."""


def broadcast_hf_buckets_via_distributed_impl(
    *,
    bucket_iterator: Iterable[list[NamedTensor]],
    rollout_engines: Sequence[Receiver],
    sender: BucketSender | None,
    exchange: RankExchange,
    deadline: Deadline,
) -> RefitStats:
    """Drain the iterator on every rank; on the rank that has a sender (rank 0), send one bucket while the next is made.

    The iterator is collective: a rank that stopped walking would leave the others in a gather. So rank 0 keeps walking
    after a failure, and one exchange at the end makes every rank return, or every rank raise the same error. A rank whose
    iterator itself raises cannot walk on: it says so and raises, and its caller ends the ranks that are in a gather.

    Args:
        bucket_iterator: a bucket's tensors must stay as they are until the bucket after the next is asked for.

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
    stats = sender.stats if sender else RefitStats()
    outcome = Outcome(
        error=as_transfer_error(failure, exchange.rank) if failure is not None else None,
        announced=sender.announced if sender else (),
        sent=(stats.num_bytes, stats.num_tensors, stats.num_buckets),
    )
    engines = tuple(engine.name for engine in rollout_engines)
    try:
        rank0 = settle(exchange, outcome, deadline, engines, follow_s=0.0 if walked else _RAISED_S)
    except TransferError:
        if sender is not None:
            sender.abandon()
        raise
    return RefitStats(*rank0.sent, spans=sender.spans() if sender else ())


def _walk(bucket_iterator: Iterable[list[NamedTensor]], sender: BucketSender | None) -> Exception | None:
    """Walk to the end; returns why sending stopped. A bucket is made while the one before is under way."""
    failure: Exception | None = None
    for bucket in bucket_iterator:
        if sender is not None and failure is None:
            failure = _send(sender, bucket)
    if sender is not None and failure is None:
        try:
            sender.finish()
        except TransferError as error:
            failure = error
    return failure


def _send(sender: BucketSender, bucket: list[NamedTensor]) -> Exception | None:
    try:
        sender.send(sender.prepare(bucket))
    except Exception as error:  # noqa: BLE001 whatever it is, the other ranks' next gather needs this rank
        # The memory of what is under way is written again from now on.
        sender.abandon()
        # Its frames hold the bucket.
        return error.with_traceback(None)
    return None
