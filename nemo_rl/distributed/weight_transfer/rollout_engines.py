"""Trainer rank 0 and the engines form the weight-update group, and part from it."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from typing import Any

from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError, TransferFacts
from nemo_rl.distributed.weight_transfer.preflight import check_ends
from nemo_rl.distributed.weight_transfer.process_group import WeightUpdateGroup
from nemo_rl.distributed.weight_transfer.receiver import Receiver

logger = logging.getLogger(__name__)

_LET_IN_S = 3.0
"""For an engine that was asked to join to reach the store."""
_FREED_S = 1.0
"""For an engine to notice that the store has ended: it takes milliseconds."""
_SETTLE_S = 0.1
"""For the store to have greeted one that has just connected: until then, too, it would try again."""
_POLL_S = 0.02
_LEAVE_S = 10.0
"""For an engine to forget a group whose connections have ended."""


def connect_rollout_engines_from_distributed(
    *,
    rollout_engines: Sequence[Receiver],
    engine_gpu_counts: Sequence[int],
    group_name: str,
    backend: str,
    master_address: str,
    deadline: Deadline,
) -> WeightUpdateGroup:
    """Form the group: all engines are asked at once, since none can join before the others.

    Raises:
        TransferError: an engine refused, or did not join within the deadline; the group has then ended on both sides.
        ValueError: see `check_ends`.
    """
    check_ends(rollout_engines, backend, os.environ)
    group = WeightUpdateGroup(
        name=group_name,
        backend=backend,
        master_address=master_address,
        world_size=1 + sum(engine_gpu_counts),
        deadline=deadline,
    )
    offsets = [1 + sum(engine_gpu_counts[:i]) for i in range(len(engine_gpu_counts))]
    counts = {engine.name: count for engine, count in zip(rollout_engines, engine_gpu_counts, strict=True)}
    joins: dict[Future[None], Receiver] = {}
    try:
        for engine, offset in zip(rollout_engines, offsets, strict=True):
            joins[engine.join(group.spec, offset, deadline.remaining_s())] = engine
        own = group.form(deadline)
    except Exception as error:  # raised below, once those that were asked are free
        _let_in(group, joins, {engine.name: counts[engine.name] for engine in joins.values()}, deadline)
        abandon(tuple(joins.values()), group)
        failure = TransferError(f"trainer rank 0 could not ask every engine to join: {error}")
        raise _with_stuck(failure, joins, deadline) from error
    waits: list[Future[Any]] = [own, *joins]
    _, pending = wait(waits, timeout=deadline.remaining_s(), return_when=FIRST_EXCEPTION)
    refusal = _refusal(joins) or _own_failure(own)
    if refusal is None and not pending:
        return group
    _let_in(group, joins, counts, deadline)
    abandon(rollout_engines, group)
    del own, waits, pending  # the error's frames hold what is left here, the backend too
    raise _with_stuck(refusal, joins, deadline)


def disconnect_rollout_engines_from_distributed(
    *, rollout_engines: Sequence[Receiver], group: WeightUpdateGroup, deadline: Deadline
) -> None:
    """Take the group down on both sides.

    Raises:
        TransferError: an engine did not let go of it.
    """
    leaves = {engine.leave(group.spec.name, deadline.remaining_s()): engine for engine in rollout_engines}
    group.close()
    done, pending = wait(leaves, timeout=deadline.remaining_s())
    failed = {leaves[future].name: str(future.exception()) for future in done if future.exception() is not None}
    failed |= {leaves[future].name: "no answer" for future in pending}
    if failed:
        raise TransferError(f"weight-update group {group.spec.name} is still held: {failed}")


def abandon(rollout_engines: Sequence[Receiver], group: WeightUpdateGroup) -> None:
    """End the connections and ask the engines to forget the group, without waiting for their answers."""
    group.close()
    for engine in rollout_engines:
        engine.leave(group.spec.name, _LEAVE_S).add_done_callback(_log_refusal)


def _log_refusal(leave: Future[None]) -> None:
    if (error := leave.exception()) is not None:
        logger.info("an engine did not leave the weight-update group that failed: %s", error)


def _refusal(joins: dict[Future[None], Receiver]) -> TransferError | None:
    for future, engine in joins.items():
        if future.done() and (error := future.exception()) is not None:
            facts = TransferFacts(engine=engine.name, engine_text=str(error), engines_failed=(engine.name,))
            return TransferError(f"{engine.name} did not join the weight-update group: {error}", facts)
    return None


def _let_in(
    group: WeightUpdateGroup, joins: dict[Future[None], Receiver], counts: Mapping[str, int], deadline: Deadline
) -> None:
    """Wait for engines that are on their way: one that comes after the store has ended tries again for half an hour."""
    limit = Deadline(min(_LET_IN_S, deadline.remaining_s()))
    refused = {engine.name for future, engine in joins.items() if future.done() and future.exception() is not None}
    expected = sum(count for name, count in counts.items() if name not in refused)
    while group.num_arrived < expected and limit.remaining_s():
        time.sleep(_POLL_S)
    time.sleep(min(_SETTLE_S, deadline.remaining_s()))


def _with_stuck(
    refusal: TransferError | None, joins: dict[Future[None], Receiver], deadline: Deadline
) -> TransferError:
    """Why the group did not form, and which engines still wait although it has ended, or say that it has formed."""
    _, pending = wait(joins, timeout=_FREED_S)
    stuck = tuple(joins[future].name for future in pending)
    content = tuple(engine.name for future, engine in joins.items() if future.done() and future.exception() is None)
    if refusal is None:
        waiting = f"waiting for {', '.join(stuck)}" if stuck else "every engine was on its way"
        waiting = f"{', '.join(content)} say that they have joined" if content else waiting
        refusal = TransferError(f"weight-update group: not formed within {deadline.timeout_s:g} s; {waiting}")
        stuck += content
    failed = tuple(dict.fromkeys((*refusal.engines_failed, *stuck)))
    return TransferError(refusal.what, replace(refusal.facts, engines_failed=failed))


def _own_failure(own: Future[Any]) -> TransferError | None:
    if own.done() and (error := own.exception()) is not None:
        return TransferError(f"trainer rank 0 could not join the weight-update group: {error}")
    return None
