"""How the trainer ranks tell one another how an operation ended."""

import dataclasses
import json
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError, TransferFacts

T = TypeVar("T")

_FOLLOW_S = 3.0
"""Beyond the deadline: for an error that is raised at it to arrive."""
_WAIT_S = 0.1
"""At a time: other threads cannot use the store meanwhile."""
_MAX_ERRORS = 4


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an operation ended on one rank."""

    error: TransferError | None = None
    announced: tuple[str, ...] = ()
    """Engines that were told of a bucket; of rank 0 alone."""
    sent: tuple[int, int, int] = (0, 0, 0)
    """Bytes, tensors and buckets; of rank 0 alone."""

    def to_json(self) -> str:
        error = self.error and {"what": self.error.what, "facts": dataclasses.asdict(self.error.facts)}
        return json.dumps({"error": error, "announced": self.announced, "sent": self.sent})

    @classmethod
    def from_json(cls, text: bytes) -> "Outcome":
        fields = json.loads(text)
        error = fields["error"] and TransferError(fields["error"]["what"], _facts(fields["error"]["facts"]))
        return cls(error=error, announced=tuple(fields["announced"]), sent=tuple(fields["sent"]))


def _facts(fields: dict[str, object]) -> TransferFacts:
    return TransferFacts(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})  # type: ignore[arg-type]


class RankExchange:
    """Goes through the trainers' store and is no collective: a rank that raised says so while others wait in a gather.

    Every rank calls `share` equally often.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank = rank
        self._store = dist.PrefixStore("nemo_rl_rank_exchange", store)
        self._world_size = world_size
        self._round = 0

    @classmethod
    def of_default_group(cls) -> "RankExchange":
        return cls(_get_default_store(), dist.get_rank(), dist.get_world_size())

    def share(self, outcome: Outcome, timeout_s: float) -> list[Outcome | None]:
        """Say how it ended here; returns how it ended on each rank, None for a rank that has not said so in time.

        Raises:
            TransferError: the store is gone, and rank 0 with it.
        """
        self._round += 1
        keys = [f"{self._round}/{rank}" for rank in range(self._world_size)]
        try:
            self._store.set(keys[self.rank], outcome.to_json())
            said = self._await(keys, timeout_s)
            # Whoever is in this round has read all of the one before.
            self._store.delete_key(f"{self._round - 1}/{self.rank}")
        except dist.DistNetworkError as error:
            raise TransferError("trainer rank 0 has ended: the ranks' store is gone") from error
        return said

    def _await(self, keys: list[str], timeout_s: float) -> list[Outcome | None]:
        deadline, heard = Deadline(timeout_s), False
        while not heard and deadline.remaining_s():
            with suppress(dist.DistStoreError):  # the time is over; who has said something by then is heard
                self._store.wait(keys, timedelta(seconds=min(_WAIT_S, deadline.remaining_s() + 0.001)))
                heard = True
        return [Outcome.from_json(self._store.get(key)) if self._store.check([key]) else None for key in keys]


def settle(
    exchange: RankExchange, outcome: Outcome, deadline: Deadline, engines: tuple[str, ...] = (), follow_s: float = 0.0
) -> Outcome:
    """Rank 0's outcome, when the operation ended well on every rank.

    Args:
        engines: all that the operation may have reached, for the case that rank 0 does not say which.
        follow_s: how long to wait for other ranks; 0: until the deadline.

    Raises:
        TransferError: on every rank that is there, with the failures in rank order.
    """
    outcomes = exchange.share(outcome, follow_s or deadline.remaining_s() + _FOLLOW_S)
    rank0 = outcomes[0]
    announced = engines if rank0 is None else rank0.announced
    if errors := [other.error for other in outcomes if other is not None and other.error is not None]:
        raise _joined(errors).touching(announced) from outcome.error
    if rank0 is None or None in outcomes:
        missing = [rank for rank, other in enumerate(outcomes) if other is None]
        what = f"trainer ranks {missing} did not follow within {deadline.timeout_s:g} s"
        raise TransferError(what).touching(announced)
    return rank0


def _joined(errors: list[TransferError]) -> TransferError:
    """One error with the facts of the first: a rank may fail because another has, and cannot know it."""
    what = dict.fromkeys(error.what for error in errors[:_MAX_ERRORS])
    return TransferError("; ".join(what), errors[0].facts)


def on_rank0(action: Callable[[], T], exchange: RankExchange, deadline: Deadline) -> T | None:
    """Run `action` on rank 0 alone; every rank returns (rank 0 the result, others None), or every rank raises.

    Raises:
        TransferError: on every rank, with rank 0's reason.
    """
    outcome, result = Outcome(), None
    if exchange.rank == 0:
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 whatever it is, the other ranks wait for the outcome
            outcome = Outcome(error=as_transfer_error(error, 0))
    settle(exchange, outcome, deadline)
    return result


def as_transfer_error(error: Exception, rank: int) -> TransferError:
    """Any failure of a rank, in a form that can be told to the others."""
    if isinstance(error, TransferError):
        return error
    return TransferError(f"trainer rank {rank}: {type(error).__name__}: {error}")
