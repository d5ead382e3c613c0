"""One row of the table of faults: what came of a fault, and whether it is as it has to be."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fault_cases import Case
from fault_rig import REFIT_TIMEOUT_S

BEYOND_DEADLINE_S = 5.0
HEADING = (
    "| fault | engines | outcome | error after s | back after s | checksums equal | answers, partial | orphans | what was said |",
    "|---|---|---|---|---|---|---|---|---|",
)
FAILED_REFIT = re.compile(r"refit \d+ failed, engines are replaced and all is sent again: ")
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


def shorten(text: str) -> str:
    """One cell: without addresses, without the tensors of a bucket, and without what to do."""
    text = _TENSORS.sub("", _ADDRESS.sub("", FAILED_REFIT.sub("", text)))
    text = text.partition("; these may hold")[0].replace("|", "/")
    text = " ".join(text.split())
    return text if len(text) <= _MAX_SAID else f"{text[:_MAX_SAID]} ..."


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
