"""Where the numbers of a run go: metrics.jsonl, TensorBoard, one console line per step, a picture at the end."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_COLUMNS = (
    # heading, metric, format
    ("reward", "train/reward_mean", "{:.3f}"),
    ("kl", "train/kl", "{:.4f}"),
    ("grad", "train/grad_norm", "{:.3f}"),
    ("mismatch", "train/token_mult_prob_error", "{:.4f}"),
    ("length", "gen/mean_length", "{:.1f}"),
    ("cut", "gen/truncated_fraction", "{:.2f}"),
    ("gen s", "time/generate_s", "{:.1f}"),
    ("train s", "time/train_s", "{:.1f}"),
    ("refit s", "time/refit_s", "{:.2f}"),
    ("MB/s", "refit/megabytes_per_s", "{:.0f}"),
    ("val acc", "validation/accuracy", "{:.3f}"),
)
_WIDTH = 9


class MetricsLogger:
    """Context manager around the loop."""

    def __init__(self, folder: Path, *, num_steps: int, tensorboard: bool, console: Console | None = None):
        self.folder = folder
        self._console = console or Console(width=None, highlight=False)
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._writer = _tensorboard_writer(folder) if tensorboard else None
        # In a log file the bar would be noise; the lines say it all.
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("train", total=num_steps)
        self._has_heading = False

    def __enter__(self) -> "MetricsLogger":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._file.close()
        if self._writer is not None:
            self._writer.close()

    def note(self, text: str) -> None:
        """A line for the person at the console."""
        self._console.print(text, markup=False, soft_wrap=True)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, object]]) -> None:
        """Append to `samples.jsonl`: prompt, response, reference and reward of each."""
        with (self.folder / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": step, **sample}, default=str) + "\n" for sample in samples)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step; `metrics` maps names to numbers."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)
        if not self._has_heading:
            self.note(" step " + "".join(f"{heading:>{_WIDTH}}" for heading, _, _ in _COLUMNS))
            self._has_heading = True
        self.note(f"{step:>5} " + "".join(f"{_cell(metrics, name, form):>{_WIDTH}}" for _, name, form in _COLUMNS))
        self._progress.update(self._task, completed=step)


def _cell(metrics: Mapping[str, float], name: str, form: str) -> str:
    return form.format(metrics[name]) if name in metrics else "-"


def _tensorboard_writer(folder: Path):  # type: ignore[no-untyped-def]
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"))


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The objects of `metrics.jsonl`."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
