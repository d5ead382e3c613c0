"""Every fault against real trainer ranks and real engines; writes the table of docs/reliability.md.

    uv run --group test tests/faults/fault_table.py [--fault NAME ...] [--engines N ...] [--rows FILE]

Without arguments it takes about 45 minutes on two cores. With `--fault` or `--engines` it prints the rows alone. With
`--rows` it adds each good row to FILE, and does not make again what FILE holds. Exit code 1 when a row is not as it has to be.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from fault_cases import CASES, Case
from fault_rig import REFIT_TIMEOUT_S, start_rig
from fault_row import HEADING
from fault_run import run_case
from marked_text import write_between

BY_NAME = {case.name: case for case in CASES}
DOCUMENT = Path(__file__).parents[2] / "docs/reliability.md"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", action="append", choices=list(BY_NAME), metavar="NAME", help="; ".join(BY_NAME))
    parser.add_argument("--engines", action="append", type=int, choices=(1, 2), help="default: 2, then 1")
    parser.add_argument("--rows", type=Path, help="file of rows to go on from")
    options = parser.parse_args(arguments)
    logging.disable(logging.INFO)
    lines = read_rows(options.rows)
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
    summary = f"{len(lines)} rows, {num_failed} not as they have to be; `refit_timeout_s` {REFIT_TIMEOUT_S:g}."
    show(summary)
    if not options.fault and not options.engines:
        table = [*HEADING, *sorted(lines, key=_place), "", summary]
        write_between(DOCUMENT, "<!-- faults: begin -->", "<!-- faults: end -->", table)
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
                    if rig.generation.failed_engines:  # of the case before: its replacement is no part of this one
                        rig.run.synchronizer.restore_engines()
                    while len(rig.generation.rollout_engines) > num_engines:
                        rig.remove_engine()
                    yield str(run_case(rig, case))
                except Exception as error:  # noqa: BLE001 whatever it is, it is the row's result
                    said = " ".join(f"{type(error).__name__}: {error}".split())[:600]
                    yield f"| {case.name} | {num_engines} | FAILED | | | | | | {said} |"
                    break
        if left := rig.orphans(living=set()):
            yield f"| end of everything | | FAILED | | | | | {len(left)} | {'; '.join(left)} |"


def _place(line: str) -> tuple[int, str]:
    """Rows of one fault one below the other."""
    name, num_engines = (cell.strip() for cell in line.split("|")[1:3])
    return list(BY_NAME).index(name) if name in BY_NAME else len(BY_NAME), num_engines


def show(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
