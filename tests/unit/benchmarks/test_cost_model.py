"""The cost model of a refit: exact values, bounds and what reduces to what."""

import json
from pathlib import Path

import cost_model
import pytest
import simulation
from simulation import Bucket, Cluster, Constants, Model

CONSTANTS = Constants(gather_s_per_bucket=1e-3, session_s=0.1)
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
    assert simulation.gather_s(2.0, ONE_NODE, 1) == pytest.approx(2.0 * (3 / 4) / 350 + 1e-3)
    assert simulation.gather_s(2.0, MANY_NODES, 1) == pytest.approx(2.0 * (504 / 512) / 50 + 1e-3)
    assert simulation.gather_s(2.0, MANY_NODES, 8) == pytest.approx(2.0 * (504 / 512) / 50 / 8 + 1e-3)
    assert simulation.gather_s(2.0, Cluster(1, 1, Constants()), 1) == 0


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
    free = list(cost_model.refit_s(SMALL, Cluster(4, 4, Constants(gather_s_per_bucket=1e-3)), 0.5, 8))
    paid = list(cost_model.refit_s(SMALL, ONE_NODE, 0.5, 8))
    assert [b - a for a, b in zip(free, paid, strict=True)] == pytest.approx([0, 0, 0, 0.1, 0.1, 0.1, 0.1])


def test_measured_constants_take_the_place_of_published_ones(tmp_path: Path) -> None:
    file = tmp_path / "constants.json"
    file.write_text(json.dumps({"load_s_per_gb": 0.01}))
    assert cost_model.read_constants(file) == Constants(load_s_per_gb=0.01)
    file.write_text(json.dumps({"load_s_per_gib": 0.01}))
    with pytest.raises(ValueError, match=r"--constants: got \['load_s_per_gib'\] in .*; allowed: load_s_per_tensor, "):
        cost_model.read_constants(file)
