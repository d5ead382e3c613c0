"""What `refit.py` measures: every path of one run, each figure a median, and the proof that what arrived is exact."""

from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measuring import MeasuringWorker
from report import Report, describe_machine

from nemo_rl.algorithms.grpo import Participants
from nemo_rl.config.schema import MasterConfig
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.process_group import default_backend
from nemo_rl.distributed.weight_transfer.timeline import LANES, Span, busy_s
from nemo_rl.models.generation.sglang.sglang_generation import SGLangGeneration
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.setup import Inputs, start_participants
from nemo_rl.utils.metrics import MetricsLogger
from nemo_rl.utils.run_folder import make_run_folder
from nemo_rl.utils.timer import Timer
from nemo_rl.weight_sync.sglang_weight_synchronizer import SGLangDisaggregatedWeightSynchronizer

BUCKET_BYTES = [2**power for power in range(25, 32)]
"""32 MiB to 2 GiB, of which those are tried that make 1 to 16 buckets."""
TIMEOUT_S = 600.0


def run_bench(config: MasterConfig, inputs: Inputs, repeats: int) -> Report:
    """Start what a run starts, measure, prove, and end everything."""
    folder = make_run_folder(config.logger.log_dir)
    with (
        MetricsLogger(folder.path, num_steps=1, tensorboard=False) as metrics,
        start_participants(config, inputs, folder, metrics, MeasuringWorker) as run,
    ):
        run.synchronizer.init_communicator()
        # The first refit sends all weights, every later one what training changes: that is measured.
        run.synchronizer.sync_weights()
        run.synchronizer.sync_weights()
        bench = Bench(config, inputs.device, run, repeats)
        return bench.measure() | bench.prove(folder.exported_model)


class Bench:
    def __init__(self, config: MasterConfig, device: str, run: Participants, repeats: int) -> None:
        assert isinstance(run.policy, Policy)
        assert isinstance(run.generation, SGLangGeneration)
        assert isinstance(run.synchronizer, SGLangDisaggregatedWeightSynchronizer)
        self.config, self.device, self.repeats = config, device, repeats
        self.policy, self.generation, self.synchronizer = run.policy, run.generation, run.synchronizer

    def measure(self) -> Report:
        stats = self.synchronizer.last_stats
        sizes = bucket_sizes(stats.num_bytes)
        refits = self.interleaved({size: lambda size=size: self.refit("this", size) for size in sizes})
        best = min(sizes, key=lambda size: median(whole_s for whole_s, _ in refits[size]))
        # Once more beside what it is compared with, at the size that suits it best.
        timed = self.interleaved(
            {path: lambda path=path: self.refit(path, best) for path in ("this", "usual", "serial")}
            | {"raw": lambda: self.raw(stats.num_bytes), "gather": lambda: self.gather(best)}
        )
        refits[best] = timed["this"]
        series = {
            "raw_s": [whole_s for whole_s, _ in timed["raw"]],
            "usual_s": [whole_s for whole_s, _ in timed["usual"]],
            "gather_s": [whole_s for whole_s, _ in timed["gather"]],
            # Told, received, loaded, answered, with nothing beside it; less the wire.
            "load_s": [
                engine_s(spans) - raw_s for (_, spans), (raw_s, _) in zip(timed["serial"], timed["raw"], strict=True)
            ],
            "serial_s": [whole_s for whole_s, _ in timed["serial"]],
        }
        medians = {name: median(seconds) for name, seconds in series.items()}
        this_s = median(whole_s for whole_s, _ in refits[best])
        return {
            "machine": describe_machine(),
            "software": {name: version(name) for name in ("torch", "transformers", "sglang")},
            "bytes": stats.num_bytes,
            "tensors": stats.num_tensors,
            "trainer_ranks": self.policy.workers.num_ranks,
            "engines": len(self.generation.rollout_engines),
            "backend": self.backend(),
            "repeats": self.repeats,
            **medians,
            "best_bucket_bytes": best,
            "spread": {name: [min(seconds), max(seconds)] for name, seconds in series.items()},
            # Memory after all that is timed: buffers are freed for it.
            "refit": [refit_entry(size, refits[size]) | self.memory(size) for size in sizes],
            "usual_phases": mean_phases(timed["usual"]),
            "timeline": [asdict(span) for span in middle(timed["this"])[1]],
            "usual_timeline": [asdict(span) for span in middle(timed["usual"])[1]],
            "ratios": {
                "refit_over_raw_gather_load": this_s / (medians["raw_s"] + medians["gather_s"] + medians["load_s"]),
                "refit_over_raw_load": this_s / (medians["raw_s"] + medians["load_s"]),
                "usual_over_refit": medians["usual_s"] / this_s,
                "serial_over_refit": medians["serial_s"] / this_s,
            },
        }

    def interleaved(self, measures: dict[Any, Callable[[], "Measured"]]) -> dict[Any, list["Measured"]]:
        """Each as often, in turn, so that a busy minute does not hit one alone; the first round does not count."""
        results: dict[Any, list[Measured]] = {name: [] for name in measures}
        for _ in range(1 + self.repeats):
            for name, measure in measures.items():
                results[name].append(measure())
        return {name: measured[1:] for name, measured in results.items()}

    def refit(self, path: str, bucket_bytes: int) -> "Measured":
        """A whole refit, as the loop makes it."""
        self.policy.workers.run("choose", timeout_s=TIMEOUT_S, path=path, bucket_bytes=bucket_bytes)
        timer = Timer()
        self.synchronizer.sync_weights(timer=timer)
        return timer.take()["refit"], self.synchronizer.last_stats.spans

    def raw(self, num_bytes: int) -> "Measured":
        engines = self.generation.rollout_engines
        self.generation.pause(Deadline(TIMEOUT_S))
        self.generation.begin_weight_update(Deadline(TIMEOUT_S))
        seconds = self.policy.workers.run("raw_s", timeout_s=TIMEOUT_S, rollout_engines=engines, num_bytes=num_bytes)
        self.generation.end_weight_update(Deadline(TIMEOUT_S))
        self.generation.resume(Deadline(TIMEOUT_S))
        return max(seconds), ()

    def gather(self, bucket_bytes: int) -> "Measured":
        return max(self.policy.workers.run("gather_s", timeout_s=TIMEOUT_S, bucket_bytes=bucket_bytes)), ()

    def memory(self, bucket_bytes: int) -> Report:
        """What one refit takes on each rank's GPU, and the most that it may; None on the CPU."""
        if self.device == "cpu":
            return {"extra_bytes": None, "bound_bytes": None}
        self.policy.workers.run("start_peak", timeout_s=TIMEOUT_S)
        self.refit("this", bucket_bytes)
        ranks = self.policy.workers.run("extra_bytes", timeout_s=TIMEOUT_S, bucket_bytes=bucket_bytes)
        return {"extra_bytes": [extra for extra, _ in ranks], "bound_bytes": [bound for _, bound in ranks]}

    def backend(self) -> str:
        configured = self.config.policy.generation.sglang_cfg.sglang_server_config.weight_update_backend
        return configured or default_backend(torch.device(self.device))

    def prove(self, export: Path) -> Report:
        """Other weights, a refit, and the engines' checksums against those after they have loaded the export."""
        before = self.generation.weight_checksums(Deadline(TIMEOUT_S))
        self.policy.workers.run("move_weights", timeout_s=TIMEOUT_S)
        self.refit("this", self.synchronizer.last_stats.num_bytes // 4)
        sent = self.generation.weight_checksums(Deadline(TIMEOUT_S))
        self.policy.export_hf(str(export))
        self.generation.update_weights_from_disk(str(export), Deadline(TIMEOUT_S))
        loaded = self.generation.weight_checksums(Deadline(TIMEOUT_S))
        return {
            "proof": {
                "checksums": sum(len(digests) for digests in loaded),
                "moved": count(before, sent, equal=False),
                "equal": count(sent, loaded, equal=True),
            }
        }


Measured = tuple[float, tuple[Span, ...]]


def bucket_sizes(num_bytes: int) -> list[int]:
    """Of those in `BUCKET_BYTES`; for a small model one that holds it and one that halves it."""
    fit = [size for size in BUCKET_BYTES if num_bytes / 16 <= size < 2 * num_bytes]
    return fit or [num_bytes // 2, num_bytes]


def refit_entry(bucket_bytes: int, measured: list[Measured]) -> Report:
    seconds = [whole_s for whole_s, _ in measured]
    num_buckets = 1 + max(span.bucket for span in measured[0][1])
    return {"bucket_bytes": bucket_bytes, "buckets": num_buckets, "seconds": median(seconds)} | {
        "spread": [min(seconds), max(seconds)],
        "phases": mean_phases(measured),
    }


def mean_phases(measured: list[Measured]) -> dict[str, float]:
    """Seconds in which each lane was at work; `session`: in which none was."""
    phases = {lane: sum(busy_s(spans, lane) for _, spans in measured) / len(measured) for lane in LANES}
    idle_s = [whole_s - busy_s(spans) for whole_s, spans in measured]
    return phases | {"session": sum(idle_s) / len(idle_s)}


def engine_s(spans: tuple[Span, ...]) -> float:
    """Seconds in which an engine had something to do, or was being told."""
    return busy_s(span for span in spans if span.lane != "gather")


def middle(measured: list[Measured]) -> Measured:
    return sorted(measured, key=lambda item: item[0])[len(measured) // 2]


def count(left: list[dict[str, str]], right: list[dict[str, str]], *, equal: bool) -> int:
    pairs = ((a[name], b[name]) for a, b in zip(left, right, strict=True) for name in a)
    return sum((x == y) is equal for x, y in pairs)
