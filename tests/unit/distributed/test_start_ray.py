"""Clusters that cannot be joined are refused within seconds."""

import socket

import pytest

from nemo_rl.config.errors import ConfigError
from nemo_rl.distributed import virtual_cluster
from nemo_rl.distributed.virtual_cluster import start_ray


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:1", "127.0.0.1:99999999", "ray://127.0.0.1:1"])
def test_a_dead_or_malformed_address(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match="RAY_ADDRESS: got .* cannot be reached"):
        start_ray(device="cpu", num_slots=1, num_nodes=1)


def test_several_nodes_need_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="cluster.num_nodes: got 2; asked 2, available 1 nodes; set RAY_ADDRESS"):
        start_ray(device="cpu", num_slots=2, num_nodes=2)


def test_an_ipv6_head_node_is_found_where_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as head:
        virtual_cluster._check_address(f"[::1]:{head.getsockname()[1]}")
