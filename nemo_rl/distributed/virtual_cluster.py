"""Ray, and the slots of a run reserved in it. A slot is one Ray GPU, or on CPU one Ray CPU."""

import logging
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl.config.errors import ConfigError, refusal
from nemo_rl.distributed.ray_guard import guarded
from nemo_rl.utils.ports import ReservedPort

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_OBJECT_STORE_BYTES = 512 * 2**20
"""Batches of token ids and log-probs; weights never pass through it."""


def start_ray(*, device: str, num_slots: int, num_nodes: int) -> None:
    """Join the cluster of `RAY_ADDRESS`, or start one on this machine.

    Raises:
        ConfigError: fewer slots than asked, or no cluster at that address.
    """
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        _require(num_nodes, 1, "cluster.num_nodes", "nodes; set RAY_ADDRESS to a cluster that has more")
        if device == "cuda":
            _require(num_slots, _local_gpus(), "cluster.gpus_per_node", "GPUs")
    if address is not None:
        _check_address(address)
    handler = signal.getsignal(signal.SIGTERM)
    with nullcontext() if address else guarded():
        _init_ray(address, device, num_slots)
    # Ray's own handler would abort the process instead of unwinding it, and leave clean-up undone.
    signal.signal(signal.SIGTERM, handler)
    if address is not None:
        kind = "GPU" if device == "cuda" else "CPU"
        available = int(ray.cluster_resources().get(kind, 0))
        _require(num_slots, available, "cluster.gpus_per_node", f"{kind} slots in the Ray cluster")


def _init_ray(address: str | None, device: str, num_slots: int) -> None:
    ray.init(
        # None would join whatever `ray start` has left on this machine.
        address=address or "local",
        # On CPU slots are counted, not cores: two ranks and an engine take turns on two cores.
        num_cpus=None if address else max(num_slots, os.cpu_count() or 1),
        num_gpus=_local_gpus() if device == "cuda" and not address else None,
        object_store_memory=None if address else _OBJECT_STORE_BYTES,
        include_dashboard=None if address else False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
    )


def _check_address(address: str) -> None:
    """Ray itself would try a dead address for minutes."""
    host, _, port = address.rpartition(":")
    try:
        if address != "auto":
            socket.create_connection(
                (host.removeprefix("[").removesuffix("]"), int(port)), timeout=_CONNECT_TIMEOUT_S
            ).close()
    except (OSError, ValueError, OverflowError) as error:
        allowed = f"cannot be reached ({error}); allowed: auto, HOST:PORT of a running head node"
        raise ConfigError([refusal("RAY_ADDRESS", address, allowed)]) from error


def _require(asked: int, available: int, key: str, what: str) -> None:
    if asked > available:
        raise ConfigError([refusal(key, asked, f"asked {asked}, available {available} {what}")])


def _local_gpus() -> int:
    import torch

    return torch.cuda.device_count()


class RayVirtualCluster:
    """A reserved set of bundles; worker i of a group runs in bundle i."""

    def __init__(self, *, name: str, slots: Sequence[float], device: str, timeout_s: float = 120.0):
        """Reserve; raises TimeoutError when the cluster has no room within `timeout_s`.

        Args:
            slots: of each bundle; less than 1: a part of a slot, which others may share.
        """
        self.num_bundles = len(slots)
        self._device = device
        self._slots = slots
        self._rendezvous: Any = None
        """Actor that holds the port."""
        kind = "GPU" if device == "cuda" else "CPU"
        self._group: PlacementGroup = placement_group([{kind: number} for number in slots], name=name)
        if not self._group.wait(timeout_s):
            remove_placement_group(self._group)
            raise TimeoutError(
                f"{name}: asked {sum(slots):g} {kind} in {len(slots)} bundles, free {ray.available_resources().get(kind, 0):g}; "
                "is another run on this Ray cluster?"
            )

    def actor_options(self, bundle: int, env: Mapping[str, str]) -> dict[str, object]:
        """Options for `ActorClass.options(...)` that place one actor in a bundle."""
        cuda = self._device == "cuda"
        return {
            "num_gpus": self._slots[bundle] if cuda else 0,
            "num_cpus": 0 if cuda else self._slots[bundle],
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
            "runtime_env": {"env_vars": dict(env)},
        }

    def reserve_rendezvous(self) -> tuple[str, int]:
        """Address of bundle 0's node and a port there that nobody else gets until `release_rendezvous`."""
        self.release_rendezvous()
        actor_class: Any = ray.remote(_RendezvousPort)
        # The bundle's slots are for who listens there.
        self._rendezvous = actor_class.options(**self.actor_options(0, {}) | {"num_cpus": 0, "num_gpus": 0}).remote()
        address: tuple[str, int] = ray.get(self._rendezvous.address.remote(), timeout=120.0)
        return address

    def release_rendezvous(self) -> None:
        """When somebody listens on the port. Idempotent."""
        if self._rendezvous is not None:
            ray.kill(self._rendezvous)
            self._rendezvous = None


class _RendezvousPort:
    """Holds a port of its node."""

    def __init__(self) -> None:
        self._port = ReservedPort(ray.util.get_node_ip_address())

    def address(self) -> tuple[str, int]:
        return self._port.address, self._port.number
