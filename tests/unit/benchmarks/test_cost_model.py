"""The cost model of a refit: exact values, bounds and what reduces to what."""

import json
from dataclasses import replace
from pathlib import Path

import cost_model
import fit_constants
import pytest
import simulation
from simulation import Bucket, Cluster, Constants, Model

CONSTANTS = Constants(gather_s_per_tensor=2e-6, gather_s_per_bucket=1e-3, session_s=0.1)
SMALL = Model("1 B", 1.0, 100)
ONE_NODE = Cluster(4, 4, CONSTANTS)
TWO_NODES = Cluster(8, 8, CONSTANTS)
MANY_NODES = Cluster(512, 512, CONSTANTS)
CLUSTERS = pytest.mark.parametrize("cluster", [ONE_NODE, TWO_NODES, MANY_NODES], ids=["8", "16", "1024"])


def sums(buckets: list[Bucket]) -> tuple[float, float, float]:
    """Gather, broadcast, load."""
    return (
        sum(bucket.gather_s for bucket in buckets),
        sum(bucket.broadcast_s for bucket in buckets),
        sum(bucket.load_s for bucket in buckets),
    )


def test_serial_is_the_sum_of_all_parts() -> None:
    assert simulation.serial_s([Bucket(1, 2, 4), Bucket(8, 16, 32)]) == 63


def test_one_bucket_in_the_pipeline_is_serial() -> None:
    assert simulation.pipeline_s([Bucket(1, 2, 4)]) == simulation.serial_s([Bucket(1, 2, 4)]) == 7


@pytest.mark.parametrize(
    ("bucket", "seconds"),
    [
        (Bucket(1, 2, 3), 1 + 4 * 5),  # the engine is the slowest: one gather, then broadcasts and loads alone
        (Bucket(6, 2, 3), 4 * 6 + 5),  # the gather is: all gathers, then the last broadcast and load
        (Bucket(5, 2, 3), 5 + 4 * 5),
    ],
)
def test_a_pipeline_of_four_buckets_follows_its_slowest_part(bucket: Bucket, seconds: float) -> None:
    assert simulation.pipeline_s([bucket] * 4) == seconds


def test_a_buffer_is_not_filled_before_it_is_sent() -> None:
    """With one buffer bucket k + 1 is gathered while bucket k loads, never while it travels."""
    buckets = [Bucket(2, 3, 1)] * 3
    assert simulation.pipeline_s(buckets, num_buffers=1) == 5 + 5 + 5 + 1
    assert simulation.pipeline_s(buckets, num_buffers=2) == 2 + 4 + 4 + 4


@CLUSTERS
@pytest.mark.parametrize("bucket_gb", [0.1, 0.5, 2.0, 8.0])
def test_a_pipeline_lies_between_its_floor_and_serial(cluster: Cluster, bucket_gb: float) -> None:
    buckets = simulation.make_buckets(SMALL, cluster, bucket_gb)
    gather_s, broadcast_s, load_s = sums(buckets)
    pipeline_s = simulation.pipeline_s(buckets)
    assert pipeline_s >= max(gather_s, broadcast_s + load_s)
    assert pipeline_s <= simulation.serial_s(buckets) + 1e-12


def test_load_has_a_term_per_tensor_per_gb_and_per_bucket() -> None:
    assert simulation.load_s(2.0, 1000, Constants()) == pytest.approx(0.040 + 0.0352 + 0.0043)
    _, _, load_s = sums(simulation.make_buckets(SMALL, ONE_NODE, bucket_gb=0.5))
    assert load_s == pytest.approx(100 * 40e-6 + 2 * 17.6e-3 + 4 * 4.3e-3)


def test_a_gather_takes_what_lies_elsewhere_over_the_slower_link() -> None:
    per_tensors_s = 100 * 2e-6
    assert simulation.gather_s(2.0, 100, ONE_NODE, 1) == pytest.approx(2.0 * (3 / 4) / 350 + per_tensors_s + 1e-3)
    assert simulation.gather_s(2.0, 100, MANY_NODES, 1) == pytest.approx(2.0 * (504 / 512) / 50 + per_tensors_s + 1e-3)
    assert simulation.gather_s(2.0, 100, MANY_NODES, 8) == pytest.approx(
        (2.0 * (504 / 512) / 50 + per_tensors_s) / 8 + 1e-3
    )
    assert simulation.gather_s(2.0, 100, Cluster(1, 1, Constants()), 1) == 0


def test_a_broadcast_is_its_links_filled_and_then_the_slowest_of_them() -> None:
    in_a_node_s, between_s, hop_s = 1e-3 / 350, 1e-3 / 50, 5e-6
    assert simulation.broadcast_s(2.0, ONE_NODE, 1, "ring") == pytest.approx(4 * hop_s + 2003 * in_a_node_s)
    assert simulation.broadcast_s(2.0, TWO_NODES, 1, "ring") == pytest.approx(
        8 * hop_s + 2000 * between_s + 7 * in_a_node_s
    )
    ring = simulation.broadcast_s(2.0, MANY_NODES, 1, "ring")
    tree = simulation.broadcast_s(2.0, MANY_NODES, 1, "tree")
    assert ring == pytest.approx((64 + 7) * hop_s + (64 + 1999) * between_s + 7 * in_a_node_s)
    assert tree == pytest.approx((7 + 7) * hop_s + (7 + 1999) * 2 * between_s + 7 * in_a_node_s)


def test_a_tree_wins_where_a_message_is_short() -> None:
    ring, tree = (simulation.broadcast_s(1e-6, MANY_NODES, 1, shape) for shape in ("ring", "tree"))
    assert tree < ring


@CLUSTERS
def test_more_senders_are_never_slower_and_stop_helping_at_the_node_link(cluster: Cluster) -> None:
    refits = [simulation.make_buckets(SMALL, cluster, 0.5, num_senders=count) for count in (1, 2, 4, 8, 16)]
    seconds = [simulation.pipeline_s(buckets) for buckets in refits]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == seconds[-2]
    assert sums(refits[-1])[1] >= SMALL.total_gb / CONSTANTS.node_gb_per_s


def test_more_engines_cost_latency_only() -> None:
    few, many = (simulation.broadcast_s(2.0, Cluster(8, count, CONSTANTS), 1, "ring") for count in (8, 512))
    assert 0 < many - few == pytest.approx(63 * (5e-6 + 1e-3 / 50))


def test_a_model_that_has_no_room_is_not_given_a_figure() -> None:
    assert [Cluster(count, count, Constants()).holds(cost_model.MODELS[2]) for count in (4, 32, 512)] == [0, 0, 1]
    table = cost_model.make_table(Constants(), 2.0, 8)
    assert table.row_count == len(cost_model.MODELS) * len(cost_model.GPUS)
    assert list(table.columns[4].cells).count("no room") == 5


def test_a_session_is_paid_once_per_refit() -> None:
    free = list(cost_model.refit_s(SMALL, Cluster(4, 4, replace(CONSTANTS, session_s=0.0)), 0.5, 8))
    paid = list(cost_model.refit_s(SMALL, ONE_NODE, 0.5, 8))
    assert [b - a for a, b in zip(free, paid, strict=True)] == pytest.approx([0, 0, 0, 0.1, 0.1, 0.1, 0.1])


def test_measured_constants_take_the_place_of_published_ones(tmp_path: Path) -> None:
    file = tmp_path / "constants.json"
    file.write_text(json.dumps({"load_s_per_gb": 0.01}))
    assert cost_model.read_constants(file) == Constants(load_s_per_gb=0.01)
    file.write_text(json.dumps({"load_s_per_gib": 0.01}))
    with pytest.raises(ValueError, match=r"--constants: got \['load_s_per_gib'\] in .*; allowed: load_s_per_tensor, "):
        cost_model.read_constants(file)


def measured_run(num_tensors: int, num_gb: float, num_buckets: int, *, ranks: int = 1) -> dict[str, object]:
    """As `refit.py` writes it, had its machine known constants."""
    return {
        "tensors": num_tensors,
        "bytes": num_gb * 1e9,
        "trainer_ranks": ranks,
        "raw_s": num_gb / 200,
        "gather_s": num_tensors * 3e-5 + num_gb * 2e-3 + num_buckets * 4e-3 + (9.0 if ranks > 1 else 0.0),
        "load_s": num_tensors * 5e-5 + num_gb * 1e-3 + num_buckets * 2e-3,
        "best_bucket_bytes": 7,
        "refit": [
            {"bucket_bytes": 7, "buckets": num_buckets, "phases": {"session": 0.03}},
            {"bucket_bytes": 8, "buckets": 99, "phases": {"session": 5.0}},
        ],
    }


def test_constants_are_found_again_in_runs_that_follow_them() -> None:
    runs = [measured_run(*run) for run in ((300, 1.0, 1), (400, 8.0, 5), (400, 16.0, 20), (5000, 0.3, 5))]
    runs.append(measured_run(400, 8.0, 5, ranks=2))
    assert fit_constants.fit_constants(runs) == pytest.approx(
        {
            "gather_s_per_tensor": 3e-5,
            "gather_s_per_gb": 2e-3,
            "gather_s_per_bucket": 4e-3,
            "load_s_per_tensor": 5e-5,
            "load_s_per_gb": 1e-3,
            "load_s_per_bucket": 2e-3,
            "session_s": 0.03,
            "node_gb_per_s": 200.0,
        }
    )
    with pytest.raises(ValueError, match="one trainer rank"):
        fit_constants.fit_constants(runs[-1:])


def test_the_constants_in_the_documentation_are_those_of_its_runs() -> None:
    folder = Path(__file__).parents[3] / "docs/measurements"
    runs = [json.loads(file.read_text()) for file in sorted(folder.glob("two_h200_*.json"))]
    published = json.loads((folder / "constants_two_h200.json").read_text())
    assert published == pytest.approx(fit_constants.fit_constants(runs), rel=0.01)
