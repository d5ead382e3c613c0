"""The faults, as data: what is done, to whom, and what has to come of it."""

from dataclasses import dataclass

from fault_proxy import UPDATE, EngineFault
from faulty_workers import RankFault

JOIN = "/init_weights_update_group"
BEGIN, END = "/begin_weight_update", "/end_weight_update"
PAUSE, CONTINUE = "/pause_generation", "/continue_generation"
VERSION, CHECKER = "/update_weight_version", "/weights_checker"
BUCKET = 3
"""Some are loaded before it, some are not."""
RECOVERS, TOLERATED, ENDS = "recovers", "tolerated", "ends the run"


@dataclass(frozen=True)
class Case:
    name: str
    expected: str
    """`recovers`: an error, then engines are replaced and the refit is done. `tolerated`: no error. `ends the run`: an
    error for whoever called; the engines go on with new trainer ranks.
    """
    engine: EngineFault | None = None
    """Of the last engine."""
    rank: RankFault | None = None
    which_rank: int = 0
    at_once: str = ""
    """A process fault of the last engine before the refit begins."""
    reconnects: bool = False
    """Whether the refit begins with a new weight-update group."""
    verify: str = "engines"
    """`refit.verify` of this refit."""


def _bucket(name: str, expected: str = RECOVERS, **fault: object) -> Case:
    return Case(f"bucket: {name}", expected, EngineFault(UPDATE, call=BUCKET, **fault))  # type: ignore[arg-type]


def _join(name: str, expected: str = RECOVERS, **fault: object) -> Case:
    return Case(f"join: {name}", expected, EngineFault(JOIN, **fault), reconnects=True)  # type: ignore[arg-type]


def _rank(rank: int, name: str, expected: str, kind: str, tensor: int = 12, seconds: float = 0.0) -> Case:
    return Case(f"rank {rank}: {name}", expected, rank=RankFault(kind, tensor, seconds), which_rank=rank)


CASES = (
    # Nothing has to be replaced.
    _bucket("answered 4 s late", TOLERATED, delay_s=4.0),
    _join("answered 4 s late", TOLERATED, delay_s=4.0),
    Case("end: answered 4 s late", TOLERATED, EngineFault(END, delay_s=4.0)),
    _rank(0, "slow by 4 s", TOLERATED, "slow", seconds=4.0),
    _rank(1, "slow by 4 s", TOLERATED, "slow", seconds=4.0),
    # Trainer ranks: the run ends.
    _rank(0, "raises in its generator", ENDS, "raise"),
    _rank(1, "raises in its generator", ENDS, "raise"),
    _rank(0, "SIGKILL", ENDS, "kill"),
    _rank(1, "SIGKILL", ENDS, "kill"),
    _rank(0, "SIGSTOP", ENDS, "stop"),
    _rank(1, "SIGSTOP", ENDS, "stop"),
    Case("checksums: wrong digest", ENDS, EngineFault(CHECKER, answer="altered"), verify="full"),
    # Engines.
    _rank(1, "raises after the last tensor", RECOVERS, "raise", tensor=-1),
    _bucket("answers 500, receives nothing", forward=False, answer="500"),
    _bucket("connection closed, receives nothing", forward=False, answer="close"),
    _bucket("no answer, receives nothing", forward=False, answer="silence"),
    _bucket("says success, receives nothing", forward=False, answer="lie"),
    _bucket("loaded, answer lost", answer="close"),
    _bucket("server SIGKILL before", before="kill server"),
    _bucket("server SIGKILL while it receives", before="stop scheduler, then kill"),
    _bucket("server SIGKILL after", after="kill server"),
    _bucket("server SIGSTOP", before="stop server"),
    _bucket("actor SIGKILL", before="kill actor"),
    Case("server SIGKILL between refits", RECOVERS, at_once="kill server"),
    _join("answers 500", forward=False, answer="500"),
    _join("says success, does not join", forward=False, answer="lie"),
    _join("server SIGKILL", before="kill server"),
    Case("pause: answers 500", RECOVERS, EngineFault(PAUSE, forward=False, answer="500")),
    Case("begin: says success, does nothing", RECOVERS, EngineFault(BEGIN, forward=False, answer="lie")),
    Case("end: answers 500", RECOVERS, EngineFault(END, forward=False, answer="500")),
    Case("version: answers 500", RECOVERS, EngineFault(VERSION, forward=False, answer="500")),
    Case("continue: answers 500", RECOVERS, EngineFault(CONTINUE, forward=False, answer="500")),
    Case("continue: says success, stays paused", RECOVERS, EngineFault(CONTINUE, forward=False, answer="lie")),
)
