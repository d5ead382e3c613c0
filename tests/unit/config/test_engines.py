"""Keys of several engines: how slots become engines, how they are routed to, what happens when one fails."""

from pathlib import Path

import pytest

from nemo_rl.config.errors import ConfigError
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


ONE_GPU = ROOT / "examples/configs/grpo_one_gpu.yaml"


def test_a_trainer_rank_and_an_engine_share_each_gpu_and_no_two_of_a_kind_do() -> None:
    overrides = ["cluster.gpus_per_node=4", f"{RESOURCES}.gpus_per_node=4", "policy.train_micro_batch_size=8"]
    layout = make_layout(load_config(ONE_GPU, overrides))
    assert layout == Layout(1, 4, 4, 1, shares_gpus=True)
    assert layout.num_slots == 4
    (share,) = set(layout.trainer_shares)
    assert share + layout.engine_share == 1
    assert 2 * share > 1
    assert share + 2 * layout.engine_share > 1
    assert layout.meets_rank0
    fewer = make_layout(load_config(ONE_GPU, ["cluster.gpus_per_node=4", "policy.train_micro_batch_size=8"]))
    assert fewer.num_engines == 1
    assert not fewer.meets_rank0
    assert fewer.trainer_shares[0] + fewer.engine_share > 1
    alone = make_layout(load_config(CPU_CONFIG))
    assert (alone.num_slots, alone.trainer_shares, alone.engine_share) == (3, [1, 1], 1)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("cluster.device=auto", "cluster.share_gpus: got true; only with cluster.device=cuda"),
        (f"{SERVER}.weight_update_backend=null", f"{SERVER}.weight_update_backend: got null; with cluster.share_gpus"),
        (f"{RESOURCES}.gpus_per_node=2", f"{RESOURCES}.gpus_per_node: got 2; asked 2 slots for engines, available 1;"),
    ],
)
def test_what_cannot_share_a_gpu_is_refused(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(ONE_GPU, [override])
    assert caught.value.lines[0].startswith(line)


def test_a_run_without_these_sections_has_their_defaults() -> None:
    sglang = load_config(CPU_CONFIG).policy.generation.sglang_cfg
    assert sglang.sglang_router_config.policy == "manual"
    tolerance = sglang.sglang_fault_tolerance_config
    assert not tolerance.use_fault_tolerance
    assert (tolerance.health_check_interval_s, tolerance.health_check_timeout_s) == (10.0, 30.0)
    assert (tolerance.max_replacements, tolerance.max_request_retries) == (10, 3)
