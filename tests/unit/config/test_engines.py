"""Keys of several engines: how slots become engines, how they are routed to, what happens when one fails."""

from pathlib import Path

import pytest

from nemo_rl.config.layout import Layout, make_layout
from nemo_rl.config.loader import load_config

ROOT = Path(__file__).parents[3]
CPU_CONFIG = ROOT / "examples/configs/grpo_sglang_broadcast_cpu.yaml"
SERVER = "policy.generation.sglang_cfg.sglang_server_config"
RESOURCES = "policy.generation.colocated.resources"


@pytest.mark.parametrize(
    ("slots", "inference", "per_engine", "engines"),
    [(4, 2, 1, 2), (4, 2, 2, 1), (6, 4, 2, 2), (8, 4, 1, 4), (3, 1, 1, 1)],
)
def test_slots_become_engines(slots: int, inference: int, per_engine: int, engines: int) -> None:
    config = load_config(
        CPU_CONFIG,
        [
            f"cluster.gpus_per_node={slots}",
            f"{RESOURCES}.gpus_per_node={inference}",
            f"{SERVER}.num_gpus_per_engine={per_engine}",
        ],
    )
    assert make_layout(config) == Layout(1, slots - inference, engines, per_engine)


def test_whole_nodes_become_engines() -> None:
    config = load_config(
        CPU_CONFIG,
        [
            "policy.train_micro_batch_size=16",
            "cluster.num_nodes=3",
            "cluster.gpus_per_node=8",
            f"{RESOURCES}.num_nodes=2",
            f"{RESOURCES}.gpus_per_node=8",
        ],
    )
    assert make_layout(config) == Layout(3, 8, 16, 1)


def test_a_run_without_these_sections_has_their_defaults() -> None:
    sglang = load_config(CPU_CONFIG).policy.generation.sglang_cfg
    assert sglang.sglang_router_config.policy == "manual"
    tolerance = sglang.sglang_fault_tolerance_config
    assert not tolerance.use_fault_tolerance
    assert (tolerance.health_check_interval_s, tolerance.health_check_timeout_s) == (10.0, 30.0)
    assert (tolerance.max_replacements, tolerance.max_request_retries) == (10, 3)
