"""Every fault against real trainer ranks and real engines; writes the table of docs/reliability.md.

    uv run --group test tests/faults/fault_table.py [--fault NAME ...] [--engines N ...] [--rows FILE]

Without arguments it takes about 40 minutes on two cores. With `--fault` or `--engines` it prints the rows alone. With
`--rows` it adds each good row to FILE, and does not make again what FILE holds. Exit code 1 when a row is not as it has to be.
"""

import argparse
import logging
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from fault_cases import CASES, ENDS, RECOVERS, TOLERATED, Case
from fault_rig import REFIT_TIMEOUT_S, FaultRig, WarningLog, start_rig
from served import ServedWatch, fingerprint, is_same

from nemo_rl.config.schema import RefitConfig
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.worker_group import WorkerGroupError
from nemo_rl.models.generation.interfaces import EnginesFailedError

BY_NAME = {case.name: case for case in CASES}
DOCUMENT = Path(__file__).parents[2] / "docs/reliability.md"
BEYOND_DEADLINE_S = 5.0
HEADING = (
    "| fault | engines | outcome | error after s | back after s | checksums equal | answers, partial | orphans | what was said |",
    "|---|---|---|---|---|---|---|---|---|",
)
_FAILED_REFIT = re.compile(r"refit \d+ failed, engines are replaced and all is sent again: ")
_TOLD = re.compile(r"refit \d+ failed|is taken for dead|^\w+Error: ")
_ADDRESS = re.compile(r" at http://[\d.:]+")
_TENSORS = re.compile(r" \(\d+ tensors, [^)]*\)")
_MAX_SAID = 240


@dataclass(frozen=True)
class Row:
    case: Case
    num_engines: int
    outcome: str
    error_s: float | None
    """From the begin of the refit to the error that its caller gets, or that is told when engines are replaced."""
    back_s: float | None
    """From there until a whole batch has been sampled from the new weights."""
    is_equal: bool
    """Engines' digests and those of the trainer's exported folder loaded from disk."""
    num_answers: int
    num_partial: int
    orphans: Sequence[str]
    said: str
    was_met: bool
    """Whether the fault's call came."""
    state: str = ""
    """What does not hold between the error and the recovery."""

    @property
    def faults(self) -> list[str]:
        """What is not as it has to be."""
        late = self.error_s is not None and self.error_s > REFIT_TIMEOUT_S + BEYOND_DEADLINE_S
        wrong = {
            f"expected: {self.case.expected}": self.outcome != self.case.expected,
            "the fault was not met": not self.was_met,
            "late": late,
            "checksums": not self.is_equal,
            "partial weights served": self.num_partial > 0,
            "orphans": bool(self.orphans),
            self.state: bool(self.state),
        }
        return [what for what, holds in wrong.items() if holds]

    def __str__(self) -> str:
        cells = [
            self.case.name,
            str(self.num_engines),
            self.outcome if not self.faults else f"FAILED ({', '.join(self.faults)}): {self.outcome}",
            _seconds(self.error_s),
            _seconds(self.back_s),
            "yes" if self.is_equal else "no",
            f"{self.num_answers}, {self.num_partial}",
            str(len(self.orphans)),
            self.said,
        ]
        return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", action="append", choices=list(BY_NAME), metavar="NAME", help="; ".join(BY_NAME))
    parser.add_argument("--engines", action="append", type=int, choices=(1, 2), help="default: 2, then 1")
    parser.add_argument("--rows", type=Path, help="file of rows to go on from")
    options = parser.parse_args(arguments)
    logging.disable(logging.INFO)
    start_s, lines = time.monotonic(), read_rows(options.rows)
    cases = [BY_NAME[name] for name in options.fault or BY_NAME]
    todo = [(case, num) for num in sorted(options.engines or (1, 2), reverse=True) for case in cases]
    have = {_place(line) for line in lines}
    for line in run_all([(case, num) for case, num in todo if (list(BY_NAME).index(case.name), str(num)) not in have]):
        show(line)
        lines.append(line)
        if options.rows is not None and "FAILED" not in line:
            with options.rows.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
    num_failed = sum("FAILED" in line for line in lines)
    summary = (
        f"{len(lines)} rows, {num_failed} not as they have to be, in {(time.monotonic() - start_s) / 60:.0f} minutes; "
        f"`refit_timeout_s` {REFIT_TIMEOUT_S:g}."
    )
    show(summary)
    if not options.fault and not options.engines:
        write_table([*HEADING, *sorted(lines, key=_place), "", summary])
    return int(num_failed > 0)


def read_rows(file: Path | None) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else []


def run_all(todo: list[tuple[Case, int]]) -> Iterator[str]:
    """A line per case. One that breaks has everything started again for those after it."""
    while todo:
        with tempfile.TemporaryDirectory() as folder, start_rig(Path(folder), num_engines=todo[0][1]) as rig:
            while todo:
                case, num_engines = todo.pop(0)
                try:
                    while len(rig.generation.rollout_engines) > num_engines:
                        rig.remove_engine()
                    yield str(run_case(rig, case))
                except Exception as error:  # noqa: BLE001 whatever it is, it is the row's result
                    said = " ".join(f"{type(error).__name__}: {error}".split())[:600]
                    yield f"| {case.name} | {num_engines} | FAILED | | | | | | {said} |"
                    break


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
        rig.run.synchronizer._connected = False
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


def shorten(text: str) -> str:
    """One cell: without addresses, without the tensors of a bucket, and without what to do."""
    text = _TENSORS.sub("", _ADDRESS.sub("", _FAILED_REFIT.sub("", text)))
    text = text.partition("; these may hold")[0].replace("|", "/")
    text = " ".join(text.split())
    return text if len(text) <= _MAX_SAID else f"{text[:_MAX_SAID]} ..."


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _place(line: str) -> tuple[int, str]:
    """Rows of one fault one below the other."""
    name, num_engines = (cell.strip() for cell in line.split("|")[1:3])
    return list(BY_NAME).index(name), num_engines


def show(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write_table(lines: Sequence[str]) -> None:
    """Between the two marks of the document."""
    begin, end = "<!-- faults: begin -->", "<!-- faults: end -->"
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    DOCUMENT.write_text(f"{before}{begin}\n{chr(10).join(lines)}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
