"""One fault in one refit, with everything that is watched meanwhile and asked afterwards."""

import logging
import re
import time

import ray
from fault_cases import ENDS, RECOVERS, TOLERATED, Case
from fault_rig import FaultRig
from fault_row import Row, shorten
from served import ServedWatch, fingerprint, is_same

from nemo_rl.config.schema import RefitConfig
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.worker_group import WorkerGroupError
from nemo_rl.models.generation.interfaces import EnginesFailedError

_TOLD = re.compile(r"refit \d+ failed|is taken for dead|^\w+Error: ")
"""The moment at which the product knew; what it warns of before is a suspicion."""


class WarningLog(logging.Handler):
    """The first warning of the product since `start_s`: the moment at which it knew."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((time.monotonic(), record.getMessage()))

    def __enter__(self) -> "WarningLog":
        logging.getLogger("nemo_rl").addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("nemo_rl").removeHandler(self)


def run_case(rig: FaultRig, case: Case) -> Row:
    """Train, inject the fault into the refit that follows, see what becomes of it."""
    rig.train()
    headers, version = rig.generation.keys.headers(admin=False), rig.run.synchronizer.version
    urls, num_engines = rig.own_urls(), len(rig.generation.rollout_engines)
    old = fingerprint(urls[0], headers)
    inject(rig, case)
    with ServedWatch(urls, headers) as watch, WarningLog() as log:
        start_s = time.monotonic()
        error, state = None, ""
        try:
            rig.run.synchronizer.sync_weights()
            rig.rollout()
        except (TransferError, EnginesFailedError, TimeoutError, WorkerGroupError) as caught:
            error, error_s = caught, time.monotonic()
            state = state_after_error(rig, version)
            recover_by_hand(rig)
        end_s = time.monotonic()
        time.sleep(0.5)
    told = log.lines if error is None else [(error_s, f"{type(error).__name__}: {error}")]
    told_s, text = next((line for line in told if _TOLD.search(line[1])), told[0] if told else (None, ""))
    new = fingerprint(rig.own_urls()[0], headers)
    assert not is_same(old, new), "the weights did not move, so nothing is shown"
    was_met = not rig.disarm()
    return Row(
        case=case,
        num_engines=num_engines,
        outcome=ENDS if error is not None else RECOVERS if told else TOLERATED,
        error_s=None if told_s is None else told_s - start_s,
        back_s=None if told_s is None else end_s - told_s,
        is_equal=rig.digests_are_those_of_the_export(),
        num_answers=len(watch.answers),
        num_partial=watch.num_partial(old, new),
        orphans=rig.orphans(rig.note_processes()),
        said=shorten(text),
        was_met=was_met,
        state=state,
    )


def inject(rig: FaultRig, case: Case) -> None:
    """Arm the fault; what it needs beside comes first."""
    last = len(rig.generation.rollout_engines) - 1
    rig.run.synchronizer._proof._refit = RefitConfig.model_validate({"verify": case.verify})
    if case.reconnects:
        # As after a failed refit: no group, and no engine is checked until one has succeeded.
        rig.run.synchronizer._connected = False
        rig.generation._fleet.suspend()
    if case.engine is not None:
        rig.arm_engine(last, case.engine)
    if case.rank is not None:
        rig.arm_rank(case.which_rank, case.rank)
    if case.at_once:
        ray.get(rig.engine(last).act.remote(case.at_once))


def state_after_error(rig: FaultRig, version: int) -> str:
    """What does not hold although it must: stale, the version where it was, no engine resumed."""
    synchronizer = rig.run.synchronizer
    if not synchronizer.is_stale:
        return "not stale after the error"
    return "" if synchronizer.version == version else "the version moved"


def recover_by_hand(rig: FaultRig) -> None:
    """As the next run would: new ranks where they have ended, and a refit. The engines that are left are used on."""
    if rig.policy.workers.num_ranks == 0:
        rig.restart_trainers()
    else:
        rig.run.synchronizer.sync_weights()
    rig.rollout()
