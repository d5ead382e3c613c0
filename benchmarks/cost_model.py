"""What a refit costs on 8, 64 and 1,024 GPUs, half of them trainers and half engines, from a small simulation.

    uv run benchmarks/cost_model.py [--constants FILE.json] [--bucket-gb 2.147] [--senders 8]

Every engine rank receives every byte. FILE.json is an object with measured values for any fields of `Constants`.
The formulas stand in `simulation.py`.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from simulation import Cluster, Constants, Model, make_buckets, pipeline_s, serial_s

TABLE_WIDTH = 120
GPUS = (8, 64, 1024)
MODELS = (
    Model("8 B dense", 8.19, 399),
    Model("70 B dense", 70.6, 723),
    # 61 layers, 58 of them with 256 experts of 3 matrices each, or with all experts in 2 tensors.
    Model("671 B MoE, split", 671.0, 45_395),
    Model("671 B MoE, fused", 671.0, 967),
)


def read_constants(file: Path) -> Constants:
    """Read the published constants with the file's values in place of some.

    Raises:
        ValueError: the file holds no JSON, or a name that is no constant.
    """
    measured = json.loads(file.read_text(encoding="utf-8"))
    allowed = [field.name for field in fields(Constants)]
    if unknown := sorted(set(measured) - set(allowed)):
        raise ValueError(f"--constants: got {unknown} in {file}; allowed: {', '.join(allowed)}")
    return replace(Constants(), **measured)


def make_table(constants: Constants, bucket_gb: float, num_senders: int) -> Table:
    """Seconds of a refit by model and GPUs: first the parts for one sender on a ring, then whole refits."""
    parts = ["gather", "broadcast", "load", "serial", "pipeline", "with tree", f"{num_senders} senders"]
    table = Table("model", "GB", "tensors", "GPUs", *parts, box=SIMPLE_HEAD, collapse_padding=True)
    for column in table.columns:
        column.no_wrap = True
        column.justify = "left" if column.header == "model" else "right"
    for model in MODELS:
        for num_gpus in GPUS:
            cluster = Cluster(num_gpus // 2, num_gpus // 2, constants)
            seconds = [f"{value:.3g}" for value in refit_s(model, cluster, bucket_gb, num_senders)]
            row = seconds if cluster.holds(model) else ["no room"]
            table.add_row(model.name, f"{model.total_gb:.0f}", f"{model.num_tensors:,}", f"{num_gpus:,}", *row)
    return table


def refit_s(model: Model, cluster: Cluster, bucket_gb: float, num_senders: int) -> Iterator[float]:
    """Yield seconds: gather, broadcast and load added up; serial; pipeline on a ring, on a tree, by several senders."""
    session_s = cluster.constants.session_s
    ring = make_buckets(model, cluster, bucket_gb)
    yield sum(bucket.gather_s for bucket in ring)
    yield sum(bucket.broadcast_s for bucket in ring)
    yield sum(bucket.load_s for bucket in ring)
    yield session_s + serial_s(ring)
    yield session_s + pipeline_s(ring)
    yield session_s + pipeline_s(make_buckets(model, cluster, bucket_gb, shape="tree"))
    yield session_s + pipeline_s(make_buckets(model, cluster, bucket_gb, num_senders=num_senders))


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds of a refit on 8, 64 and 1,024 GPUs, from a cost model.")
    parser.add_argument("--constants", type=Path, help="JSON object with measured values for fields of Constants")
    parser.add_argument("--bucket-gb", type=float, default=2**31 / 1e9, help="size of a bucket (2.147: 2 GiB)")
    parser.add_argument("--senders", type=int, default=8, help="trainer ranks that send, in the last column")
    arguments = parser.parse_args()
    try:
        constants = read_constants(arguments.constants) if arguments.constants else Constants()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    console = Console(highlight=False, soft_wrap=True, width=TABLE_WIDTH)
    console.print(f"{constants}\nbucket {arguments.bucket_gb:.3g} GB; seconds:")
    console.print(make_table(constants, arguments.bucket_gb, arguments.senders))


if __name__ == "__main__":
    main()
