"""The picture of one benchmark of the refit: where the time goes, and one refit over time."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

COLORS = {
    "gather": "tab:blue",
    "announce": "tab:purple",
    "broadcast": "tab:orange",
    "load": "tab:green",
    "session": "tab:gray",
}
LANES = ("gather", "announce", "broadcast", "load")
Report = dict[str, Any]


def draw_report(report: Report, title: str, path: Path) -> None:
    """Draw the stacked bars on the left and the timelines on the right, as a PNG at `path`."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.titlesize": 12})
    figure = plt.figure(figsize=(17, 7.5), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 1.3))
    _draw_bars(figure.add_subplot(grid[:, 0]), report)
    upper = figure.add_subplot(grid[0, 1])
    lower = figure.add_subplot(grid[1, 1], sharex=upper)
    _draw_timeline(upper, report["usual_timeline"], "One refit on the usual path; numbers are buckets")
    _draw_timeline(lower, report["timeline"], "One refit on this path; numbers are buckets")
    lower.set_xlabel("seconds since the start of the refit")
    figure.suptitle(title, fontsize=13)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_bars(axes: Axes, report: Report) -> None:
    """Busy seconds per phase, stacked; a dash for the elapsed seconds, which overlap makes less than the stack."""
    bars = _bars(report)
    bottom = [0.0] * len(bars)
    for phase, color in COLORS.items():
        heights = [phases.get(phase, 0.0) for _, _, phases in bars]
        axes.bar(range(len(bars)), heights, bottom=bottom, width=0.62, color=color, label=phase)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    top = max(*bottom, *(elapsed for _, elapsed, _ in bars))
    for x, (_, elapsed, _) in enumerate(bars):
        axes.hlines(elapsed, x - 0.42, x + 0.42, color="black", linewidth=2, label="elapsed" if x == 0 else "")
        text_y = max(elapsed, bottom[x]) + 0.01 * top
        axes.text(x, text_y, f"{elapsed:.3g} s", ha="center", va="bottom", fontweight="bold")
    axes.set(
        title="Where the time goes: seconds each phase is busy,\nand elapsed (median)",
        ylabel="seconds",
        ylim=(0, 1.3 * top),
    )
    axes.set_xticks(range(len(bars)), [label for label, _, _ in bars])
    axes.legend(loc="upper center", ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _bars(report: Report) -> list[tuple[str, float, dict[str, float]]]:
    """Label, elapsed seconds and busy seconds per phase of each bar."""
    alone = {"gather": report["gather_s"], "broadcast": report["raw_s"], "load": report["load_s"]}
    bars = [
        ("raw\nbroadcast", report["raw_s"], {"broadcast": report["raw_s"]}),
        ("gather,\nraw, load,\neach alone", sum(alone.values()), alone),
        ("usual\npath", report["usual_s"], report["usual_phases"]),
    ]
    for refit in report["refit"]:
        bars.append((f"this path\n{bucket_name(refit['bucket_bytes'])}", refit["seconds"], refit["phases"]))
    return bars


def _draw_timeline(axes: Axes, spans: list[dict[str, Any]], title: str) -> None:
    """One lane per phase; neighbouring buckets in two shades, numbered where there is room."""
    lanes = [*LANES, *(lane for lane in dict.fromkeys(span["lane"] for span in spans) if lane not in LANES)]
    end_s = max(span["end_s"] for span in spans)
    for span in spans:
        y, width_s = lanes.index(span["lane"]), span["end_s"] - span["start_s"]
        color = _shade(COLORS.get(span["lane"], "tab:gray"), lighter=span["bucket"] % 2 == 1)
        axes.barh(y, width_s, left=span["start_s"], height=0.7, color=color, edgecolor=color, linewidth=0.4)
        if width_s > 0.025 * end_s:
            axes.text(span["start_s"] + width_s / 2, y, str(span["bucket"]), ha="center", va="center", fontsize=9)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_title(title)
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _shade(color: str, *, lighter: bool) -> tuple[float, ...]:
    """The colour, or the same halfway to white."""
    return tuple((1 + value) / 2 if lighter else value for value in to_rgb(color))


def bucket_name(bucket_bytes: int) -> str:
    """Size in MiB or GiB: `64 MiB`, `1.5 GiB`."""
    mebibytes = bucket_bytes / 2**20
    return f"{mebibytes:.4g} MiB" if mebibytes < 1024 else f"{mebibytes / 1024:.4g} GiB"
