"""Constants of the cost model from runs of `refit.py` on one machine, by non-negative least squares of relative errors.

    uv run benchmarks/fit_constants.py logs/refit/refit.json ... > constants.json

Every run is one equation per part, at its best bucket size: the gathers of runs with one trainer rank (no wire in them),
the engine's time of all runs. The link is the largest run's; the session is the median. Runs should differ in tensors,
bytes and buckets, else a term takes what belongs to another.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

Run = dict[str, Any]
TERMS: dict[str, Callable[[Run], float]] = {
    "per_tensor": lambda run: run["tensors"],
    "per_gb": lambda run: run["bytes"] / 1e9,
    "per_bucket": lambda run: _best(run)["buckets"],
}


def fit_constants(runs: Sequence[Run]) -> dict[str, float]:
    """Fields of `simulation.Constants` by name.

    Raises:
        ValueError: no run has one trainer rank.
    """
    without_wire = [run for run in runs if run["trainer_ranks"] == 1]
    if not without_wire:
        raise ValueError("the gather's constants need a run with one trainer rank")
    largest = max(runs, key=lambda run: run["bytes"])
    return {
        **_fit("gather", without_wire),
        **_fit("load", runs),
        "session_s": statistics.median(_best(run)["phases"]["session"] for run in runs),
        "node_gb_per_s": largest["bytes"] / 1e9 / largest["raw_s"],
    }


def _fit(part: str, runs: Sequence[Run]) -> dict[str, float]:
    """Divided by what was measured, so that a small model counts as much as a large one."""
    rows = [[term(run) / run[f"{part}_s"] for term in TERMS.values()] for run in runs]
    values, _ = nnls(np.array(rows), np.ones(len(runs)))
    return {f"{part}_s_{name}": float(value) for name, value in zip(TERMS, values, strict=True)}


def _best(run: Run) -> Run:
    best: Run = next(entry for entry in run["refit"] if entry["bucket_bytes"] == run["best_bucket_bytes"])
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="Constants of the cost model from measured refits.")
    parser.add_argument("runs", nargs="+", type=Path, help="refit.json of refit.py, all of one machine")
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in parser.parse_args().runs]
    constants = {name: float(f"{value:.3g}") for name, value in fit_constants(runs).items()}
    sys.stdout.write(json.dumps(constants, indent=1) + "\n")


if __name__ == "__main__":
    main()
