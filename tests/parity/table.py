"""Every shape of a policy against a plain model in one process; writes the table of docs/parallelism.md.

    uv run --group test tests/parity/table.py [--shape NAME ...]

With `--shape` it prints the rows alone. Exit code 1 when a difference is above the tolerance.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "unit/models/policy"))
import policy_cases as cases
from comparison import HEADING, compare, row
from marked_text import write_between
from plain import train_plain
from ranks import Run, spawn
from shapes import FAMILIES, SHAPES, Shape
from transformers.utils.logging import disable_progress_bar

DOCUMENT = Path(__file__).parents[2] / "docs/parallelism.md"
BY_NAME = {shape.name: shape for shape in SHAPES}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=list(BY_NAME), metavar="NAME", help="; ".join(BY_NAME))
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    disable_progress_bar()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for line in rows([BY_NAME[name] for name in options.shape or BY_NAME], Path(folder)):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            lines.append(line)
    if not options.shape:
        write_between(DOCUMENT, "<!-- parity -->", "<!-- end of parity -->", [*HEADING, *lines])
    return int(any("FAILED" in line for line in lines))


def rows(shapes: Sequence[Shape], folder: Path) -> Iterator[str]:
    """Ranks are started once for all shapes that have as many."""
    runs = {}
    for number, shape in enumerate(shapes):
        model = cases.write_model(folder / str(number), FAMILIES[shape.family].make_config())
        runs[shape.name] = Run(shape, model, cases.free_port())
    seen = {
        num_ranks: spawn([run for run in runs.values() if run.shape.num_ranks == num_ranks], folder / f"x{num_ranks}")
        for num_ranks in sorted({shape.num_ranks for shape in shapes})
    }
    for shape in shapes:
        ranks = [rank[shape.name] for rank in seen[shape.num_ranks]]
        yield row(shape, compare(ranks, train_plain(runs[shape.name].folder, shape), shape))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
