"""Prove every family on the real engine and every class of transformers by its stream; write docs/families.md.

    uv run --group test tests/families/prove.py [--family NAME ...]

Without arguments it takes about half an hour on two cores and replaces the tables of docs/families.md. With `--family`
it prints the lines of those families alone.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import torch
from engine_rig import EngineRig, Row
from family import Family, write_checkpoint
from marked_text import write_between
from stream_check import StreamReport, check_class, check_stream, single_rank_mesh
from text_families import TEXT_FAMILIES
from tiny_fixes import CHANGED_BY_LOADING
from tiny_models import CannotBuild, all_cases
from torch.distributed.device_mesh import DeviceMesh
from transformers.utils.logging import disable_progress_bar
from vision_families import VISION_FAMILIES

FAMILIES = {family.name: family for family in (*TEXT_FAMILIES, *VISION_FAMILIES)}
DOCUMENT = Path(__file__).parents[2] / "docs/families.md"
HEADING = (
    "| family | tensors | bytes | renamed | checksums equal | `/generate` | refit s | total s |",
    "|---|---|---|---|---|---|---|---|",
)


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 when anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", choices=list(FAMILIES), metavar="NAME", help=", ".join(FAMILIES))
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    disable_progress_bar()
    torch.set_num_threads(1)
    mesh = single_rank_mesh()
    lines = []
    for line in prove([FAMILIES[name] for name in options.family or FAMILIES], mesh):
        show(line)
        lines.append(line)
    if not options.family:
        streams = list(check_all_streams(mesh))
        show("\n".join(streams))
        write_between(DOCUMENT, "<!-- engine -->", "<!-- end of engine -->", [*HEADING, *lines])
        write_between(DOCUMENT, "<!-- streams -->", "<!-- end of streams -->", streams)
        lines += streams
    return int(any("FAILED" in line for line in lines))


def prove(families: Sequence[Family], mesh: DeviceMesh) -> Iterator[str]:
    """A line per family. One that fails has another cluster made for those after it."""
    waiting = list(families)
    while waiting:
        with tempfile.TemporaryDirectory() as folder, EngineRig(Path(folder)) as rig:
            while waiting:
                family = waiting.pop(0)
                try:
                    yield engine_line(rig.prove(family)) if family.engine_starts else stream_line(family, mesh)
                except (AssertionError, RuntimeError, TimeoutError) as error:
                    yield f"| {family.name} | | | | FAILED: {' '.join(str(error).split())[:400]} | | | |"
                    break


def engine_line(row: Row) -> str:
    verdict = f"{row.num_equal} of {row.num_digests}"
    if row.num_equal < row.num_digests:
        verdict = f"FAILED: {verdict}"
    if row.unmoved:
        verdict += f" (the same in both checkpoints: {', '.join(row.unmoved)})"
    return (
        f"| {row.family} | {row.num_tensors} | {row.num_bytes:,} | {row.num_renamed} | {verdict} "
        f"| {row.answers or 'weights only'} | {row.refit_s:.2f} | {row.total_s:.0f} |"
    )


def stream_line(family: Family, mesh: DeviceMesh) -> str:
    """For a family that the engine does not start."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(family, Path(folder), seed=0)
        report = check_stream(Path(folder), mesh)
    verdict = verdict_of(report) or "engine does not start; stream equals the file"
    return f"| {family.name} | {report.num_tensors} | {report.num_bytes:,} | {report.num_renamed} | {verdict} | | | |"


def verdict_of(report: StreamReport) -> str:
    return f"FAILED: {'; '.join(report.differences[:3])}" if report.differences else ""


def check_all_streams(mesh: DeviceMesh) -> Iterator[str]:
    """One line in sum, one for each class that differs or cannot be built."""
    equal, others = 0, []
    for case in all_cases():
        with tempfile.TemporaryDirectory() as folder:
            try:
                verdict = verdict_of(check_class(case, Path(folder), mesh))
            except CannotBuild as error:
                others.append(f"- cannot be built: {error}")
                continue
        equal += not verdict
        others += [f"- `{case.architecture}` {verdict}"] if verdict else []
    yield f"{equal} of {equal + len(others)} classes: manifest, stream and file are equal."
    yield from others
    yield (
        "- "
        + "; ".join(f"`{name}`: {', '.join(tensors)}" for name, tensors in CHANGED_BY_LOADING.items())
        + (": transformers overwrites these values on loading, which the proof of the first refit would refuse")
    )


def show(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
