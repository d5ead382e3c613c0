"""Many refits with a random fault every tenth; ends with every engine's checksums equal to the exported folder's.

    uv run --group test tests/faults/soak.py [--refits 100] [--engines 1] [--seed 0]

100 refits take about 15 minutes on two cores. Exit code 1 when checksums differ or memory grows.
"""

import argparse
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from fault_cases import CASES, RECOVERS, TOLERATED, Case
from fault_rig import FaultRig, start_rig
from fault_run import inject
from fault_table import show

EVERY = 10
SOAK_CASES = tuple(case for case in CASES if case.expected in (RECOVERS, TOLERATED))
"""All but those that end the trainer ranks, and the run with them."""
GROWTH_BYTES = 200 * 2**20
"""Over the whole soak. The ranks' first refits make buffers and threads that stay."""


@dataclass
class Soak:
    """What a soak has seen."""

    num_recoveries: int = 0
    faults: list[str] = field(default_factory=list)
    memory: list[dict[str, int]] = field(default_factory=list)
    """Resident bytes of driver, ranks and engines (all processes of each, together) after each refit."""
    is_equal: bool = False

    def growth_bytes(self) -> dict[str, int]:
        """From the refit after the first to the last."""
        first, last = self.memory[min(1, len(self.memory) - 1)], self.memory[-1]
        return {name: last[name] - first[name] for name in first}


def run_soak(rig: FaultRig, num_refits: int, choose: Callable[[], Case], note: Callable[[str], None]) -> Soak:
    """Train and refit so often; the fifth refit of every ten meets the fault that `choose` gives.

    Raises:
        AssertionError: a version did not follow the one before, or samples are of another.
    """
    soak, first = Soak(), rig.run.synchronizer.version
    for number in range(1, num_refits + 1):
        rig.train()
        if number % EVERY == EVERY // 2:
            case = choose()
            inject(rig, case)
            soak.faults.append(case.name)
            note(f"refit {number}: {case.name}")
        rig.run.synchronizer.sync_weights()
        assert rig.run.synchronizer.version == first + number
        rig.rollout()
        soak.memory.append(resident_bytes(rig))
    soak.num_recoveries = int(rig.run.synchronizer.metrics()["refit/recoveries"])
    soak.is_equal = rig.digests_are_those_of_the_export()
    return soak


def resident_bytes(rig: FaultRig) -> dict[str, int]:
    living = rig.note_processes()
    ranks = rig.policy.workers.run("resident_bytes", timeout_s=60)
    engines = [pid for pid in living if pid not in rig.policy.workers.run("process_id", timeout_s=60)]
    return {
        "driver": psutil.Process().memory_info().rss,
        **{f"rank {rank}": value for rank, value in enumerate(ranks)},
        "engines": sum(rig.seen[pid].memory_info().rss for pid in engines),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refits", type=int, default=100)
    parser.add_argument("--engines", type=int, choices=(1, 2), default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    logging.disable(logging.INFO)
    start_s, random_faults = time.monotonic(), random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder, start_rig(Path(folder), num_engines=options.engines) as rig:
        soak = run_soak(rig, options.refits, lambda: random_faults.choice(SOAK_CASES), show)
    grown = {name: size for name, size in soak.growth_bytes().items() if size > GROWTH_BYTES}
    show(
        f"{options.refits} refits, {len(soak.faults)} faults, {soak.num_recoveries} recoveries, {options.engines} engine(s)"
    )
    show(f"minutes: {(time.monotonic() - start_s) / 60:.1f}")
    show(f"checksums equal to those of the exported folder: {'yes' if soak.is_equal else 'NO'}")
    for name in soak.memory[0]:
        sizes = [entry[name] / 2**20 for entry in soak.memory]
        show(f"{name}: resident MiB first {sizes[0]:.0f}, last {sizes[-1]:.0f}, highest {max(sizes):.0f}")
    return int(not soak.is_equal or bool(grown))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
