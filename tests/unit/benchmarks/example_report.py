"""A report as a benchmark of the refit makes it, with invented times."""

from typing import Any

MIB = 2**20
TOTAL_BYTES = 269_030_016


def make_report() -> dict[str, Any]:
    """135 M dense on two cores: the usual path one after the other, this path with two buckets on their way."""
    phases = {"gather": 0.25, "broadcast": 0.18, "load": 0.22, "session": 0.03}
    usual = {"gather": 0.62, "broadcast": 0.35, "load": 0.26, "session": 0.03}
    refit = [
        {"bucket_bytes": size * MIB, "buckets": -(-TOTAL_BYTES // (size * MIB)), "seconds": seconds}
        | {"spread": [seconds - 0.02, seconds + 0.05], "phases": phases, "extra_bytes": None, "bound_bytes": None}
        for size, seconds in ((16, 0.52), (64, 0.47), (256, 0.60), (1024, 0.68))
    ]
    return {
        "preset": "135m",
        "machine": {"name": "2 cores", "cpu": "A CPU", "cores": 2, "gpus": []},
        "software": {"torch": "2.14.1", "transformers": "5.19.0", "sglang": "0.5.23"},
        "bytes": TOTAL_BYTES,
        "tensors": 272,
        "trainer_ranks": 2,
        "engines": 1,
        "backend": "gloo",
        "repeats": 5,
        "raw_s": 0.14,
        "usual_s": 1.26,
        "gather_s": 0.25,
        "load_s": 0.21,
        "spread": {"raw_s": [0.13, 0.15], "usual_s": [1.2, 1.31], "gather_s": [0.24, 0.3], "load_s": [0.2, 0.24]},
        "refit": refit,
        "usual_phases": usual,
        "timeline": timeline(num_buckets=5, phases=phases, overlap=True),
        "usual_timeline": timeline(num_buckets=5, phases=usual, overlap=False),
        "ratios": {"refit_over_floor": 0.47 / 0.6, "usual_over_refit": 1.26 / 0.47},
        "proof": {"checksums": 182, "equal": 182, "moved": 182},
    }


def timeline(num_buckets: int, phases: dict[str, float], *, overlap: bool) -> list[dict[str, Any]]:
    """Spans of equal buckets; with `overlap` a bucket is gathered while the one before it travels."""
    spans = []
    gathered_s = 0.0
    loaded_s = 0.0
    for bucket in range(num_buckets):
        now_s = gathered_s if overlap else loaded_s
        for lane in ("gather", "broadcast", "load"):
            if lane == "broadcast":
                gathered_s = now_s
                now_s = max(now_s, loaded_s)
            start_s, now_s = now_s, now_s + phases[lane] / num_buckets
            spans.append({"lane": lane, "bucket": bucket, "start_s": start_s, "end_s": now_s})
        loaded_s = now_s
    return spans
