"""What is written about one benchmark of the refit: a table, `refit.json`, `refit.png`, and `trace.json` for Perfetto."""

import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from picture import bucket_name, draw_report
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

Report = dict[str, Any]
PHASES = ("gather", "broadcast", "load", "session")
TABLE_WIDTH = 120
"""Columns of text, also where the output is no terminal."""
NOMINAL_GB = {"H200": 141}
"""Memory of a GPU as its maker names it; what CUDA reports is less."""
COUNTS = {1: "one", 2: "two", 4: "four", 8: "eight"}


def describe_machine() -> dict[str, Any]:
    """`name` as the documentation has it, CPU model, cores that this process may use, and names of the GPUs that it sees."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0))
    return {"name": machine_name(gpus, cores), "cpu": _cpu_model(), "cores": cores, "gpus": gpus}


def machine_name(gpus: list[str], cores: int) -> str:
    """Of one or more GPUs and of CPU cores: `two H200 (141 GB), 32 cores`; `2 cores`."""
    parts = []
    for name in dict.fromkeys(gpus):
        count, model = gpus.count(name), name.removeprefix("NVIDIA ")
        memory = f" ({NOMINAL_GB[model]} GB)" if model in NOMINAL_GB else ""
        parts.append(f"{COUNTS.get(count, count)} {model}{memory}")
    return ", ".join([*parts, _counted(cores, "core")])


def write_report(report: Report, folder: Path) -> None:
    """Show the table and write `refit.json`, `refit.png` and `trace.json` to `folder`; all times are in seconds.

    Bytes and tensors are those of every refit but the first: what training changes.

    The report holds: preset, machine (`describe_machine`), software (versions by name), bytes, tensors,
    trainer_ranks, engines, backend, repeats; the medians raw_s, usual_s, gather_s, load_s and spread (name -> [min,
    max]); refit, a list of {bucket_bytes, buckets, seconds, spread, phases, extra_bytes, bound_bytes}, the last two per
    rank, or None on the CPU; usual_phases; timeline and usual_timeline, lists of {lane, bucket, start_s, end_s}; ratios
    (name -> float); proof {checksums, equal, moved}: moved are those that the last refit changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "refit.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    (folder / "trace.json").write_text(json.dumps(make_trace(report)), encoding="utf-8")
    draw_report(report, headline(report), folder / "refit.png")
    show(report, folder, Console(highlight=False, soft_wrap=True, width=TABLE_WIDTH))


def unproven(proof: dict[str, int]) -> str | None:
    """What is wrong with the proof of a report, if anything."""
    checksums, moved, equal = proof["checksums"], proof["moved"], proof["equal"]
    if equal == checksums and moved:
        return None
    return (
        f"after the refit {equal} of {checksums} engine checksums equal the exported folder's, and it changed {moved}"
    )


def headline(report: Report) -> str:
    """Name what was measured and where, in two lines."""
    machine = report["machine"]
    parts = [f"{report['preset']}: {report['bytes'] / 1e9:.2f} GB, {report['tensors']:,} tensors"]
    parts.append(f"{_counted(report['trainer_ranks'], 'trainer rank')} to {_counted(report['engines'], 'engine')}")
    parts.append(f"{report['backend']}, median of {report['repeats']}")
    where = [
        f"{machine['name']}, {machine['cpu']}",
        *(f"{name} {version}" for name, version in report["software"].items()),
    ]
    return "; ".join(parts) + "\n" + "; ".join(where)


def show(report: Report, folder: Path, console: Console) -> None:
    """Print every figure with its spread, the ratios and the proof."""
    console.print(headline(report))
    table = Table("seconds", "buckets", "median", "spread", "GB/s", *PHASES, box=SIMPLE_HEAD)
    for column in table.columns:
        column.no_wrap = True
        column.justify = "left" if column.header == "seconds" else "right"
    for row in _rows(report):
        table.add_row(*row)
    console.print(table)
    for refit in report["refit"]:
        if refit["extra_bytes"] is not None:
            console.print(_memory(refit))
    for name, value in report["ratios"].items():
        console.print(f"{name.replace('_', ' '):<24} {value:.2f}")
    proof = report["proof"]
    console.print(f"proof: {proof['equal']} of {proof['checksums']} engine checksums equal, {proof['moved']} changed")
    console.print(f"written to {folder}: refit.json, refit.png, trace.json (open it at https://ui.perfetto.dev)")


def _rows(report: Report) -> Iterator[list[str]]:
    for label, key in (("raw broadcast", "raw_s"), ("gather alone", "gather_s"), ("engine load alone", "load_s")):
        yield _row(report, label, report[key], report["spread"][key])
    yield _row(report, "usual path", report["usual_s"], report["spread"]["usual_s"], phases=report["usual_phases"])
    for refit in report["refit"]:
        label = f"this path, {bucket_name(refit['bucket_bytes'])}"
        yield _row(report, label, refit["seconds"], refit["spread"], str(refit["buckets"]), refit["phases"])


def _row(
    report: Report,
    label: str,
    seconds: float,
    spread: list[float],
    buckets: str = "",
    phases: dict[str, float] | None = None,
) -> list[str]:
    low, high = spread
    spent = [f"{phases[phase]:.3f}" if phases else "" for phase in PHASES]
    rate = f"{report['bytes'] / 1e9 / seconds:.2f}"
    return [label, buckets, f"{seconds:.3f}", f"{low:.3f} to {high:.3f}", rate, *spent]


def _memory(refit: Report) -> str:
    ranks = zip(refit["extra_bytes"], refit["bound_bytes"], strict=True)
    taken = [f"rank {rank} {extra / 1e9:.3f} of {bound / 1e9:.3f} GB" for rank, (extra, bound) in enumerate(ranks)]
    return f"memory, {bucket_name(refit['bucket_bytes'])} buckets: {', '.join(taken)} allowed"


def make_trace(report: Report) -> dict[str, Any]:
    """Chrome trace events, times in microseconds: one process per path, one thread per lane."""
    events: list[dict[str, Any]] = []
    for pid, (name, key) in enumerate((("this path", "timeline"), ("usual path", "usual_timeline")), start=1):
        spans = report[key]
        tids = {lane: tid for tid, lane in enumerate(dict.fromkeys(span["lane"] for span in spans), start=1)}
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for lane, tid in tids.items():
            common = {"ph": "M", "pid": pid, "tid": tid}
            events.append(common | {"name": "thread_name", "args": {"name": lane}})
            events.append(common | {"name": "thread_sort_index", "args": {"sort_index": tid}})
            events += _events([span for span in spans if span["lane"] == lane], pid, tid)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(spans: list[dict[str, Any]], pid: int, tid: int) -> Iterator[dict[str, Any]]:
    """One event per span of a lane, none beginning before the one before has ended: Perfetto drops events that overlap.

    Spans may: a bucket counts as loading from its arrival on, though the engine loads one after the other.
    """
    free_us = 0
    for span in spans:
        start_us = max(free_us, round(span["start_s"] * 1e6))
        free_us = max(start_us, round(span["end_s"] * 1e6))
        yield {
            "ph": "X",
            "name": f"{span['lane']} {span['bucket']}",
            "cat": span["lane"],
            "pid": pid,
            "tid": tid,
            "ts": start_us,
            "dur": free_us - start_us,
            "args": {"bucket": span["bucket"]},
        }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()  # kernels of other architectures give no name


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
