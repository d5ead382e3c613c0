"""The picture of a run."""

from pathlib import Path

from nemo_rl.utils.metrics import read_metrics

PHASES = ("generate", "train", "refit")


def plot_run(folder: Path) -> Path:
    """Draw reward and accuracy, mismatch, and seconds per phase from `metrics.jsonl`; returns the PNG's path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read_metrics(folder)
    steps = [row for row in rows if "train/reward_mean" in row]
    checks = [row for row in rows if "validation/accuracy" in row]
    figure, (reward, mismatch, seconds) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")

    _line(reward, steps, "train/reward_mean", label="reward, T = 1 (training)", marker=".")
    _line(reward, checks, "validation/accuracy", label="accuracy, greedy (held out)", marker="o")
    reward.set(title="Reward", xlabel="step", ylim=(0, 1))
    reward.legend(loc="upper left", frameon=False)

    _line(mismatch, steps, "train/token_mult_prob_error", marker=".", color="tab:red")
    mismatch.axhline(1.0, color="grey", linewidth=0.8)
    mismatch.set(title="Trainer vs engine: mean exp|Δ log-prob|", xlabel="step")

    x = [row["step"] for row in steps]
    bottom = [0.0] * len(steps)
    for phase in PHASES:
        height = [row[f"time/{phase}_s"] for row in steps]
        seconds.bar(x, height, bottom=bottom, label=phase)
        bottom = [low + high for low, high in zip(bottom, height, strict=True)]
    seconds.set(title="Seconds per step", xlabel="step")
    seconds.legend(loc="upper right", frameon=False)

    for axis in (reward, mismatch, seconds):
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.get_major_locator().set_params(integer=True)
    path = folder / "run.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _line(axis, rows: list[dict[str, float]], name: str, **style: object) -> None:  # type: ignore[no-untyped-def]
    axis.plot([row["step"] for row in rows], [row[name] for row in rows], **style)
