"""What is supported, as data: the guard, its messages, the docs table and the tests are all made from it.

`check_support` runs when a config is loaded, and again first thing in `create_weight_synchronizer`, so that an
unsupported combination fails before any actor, model or server exists and not after a rollout.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl.config.errors import ConfigError, refusal, yaml_text

ANY = None


@dataclass(frozen=True)
class Route:
    """How the weights travel for one combination, or why they cannot. ANY matches everything."""

    policy: str | None
    generation: str | None
    colocated: bool | None
    transfer_mode: str | None
    transport: str | None = None
    """Set: supported."""
    key: str = ""
    why: str = ""
    instead: str = ""


DEVICE_KEY = "policy.generation.colocated.enabled"
MODE_KEY = "policy.generation.sglang_cfg.sglang_server_config.weight_transfer_mode"

# The first row that matches decides.
ROUTES = (
    Route("dtensor_v2", "sglang", False, "broadcast", transport="broadcast from trainer rank 0 to every engine rank"),
    Route(
        "megatron", ANY, ANY, ANY,
        key="policy.megatron_cfg.enabled", why="the Megatron policy is not part of this project",
        instead="policy.megatron_cfg.enabled=false policy.dtensor_cfg.enabled=true",
    ),
    Route(
        "none", ANY, ANY, ANY,
        key="policy.dtensor_cfg.enabled", why="no policy backend is enabled", instead="policy.dtensor_cfg.enabled=true",
    ),
    Route(
        "dtensor_v1", ANY, ANY, ANY,
        key="policy.dtensor_cfg._v2", why="the DTensor v1 worker cannot refit SGLang",
        instead="policy.dtensor_cfg._v2=true",
    ),
    Route(
        ANY, "vllm", ANY, ANY,
        key="policy.generation.backend", why="generation runs on SGLang", instead="policy.generation.backend=sglang",
    ),
    Route(
        ANY, "megatron", ANY, ANY,
        key="policy.generation.backend", why="generation runs on SGLang", instead="policy.generation.backend=sglang",
    ),
    Route(
        ANY, "sglang", True, "broadcast",
        key=DEVICE_KEY, why="broadcast needs the engines on their own devices", instead=f"{DEVICE_KEY}=false",
    ),
    Route(
        ANY, "sglang", True, "ipc",
        key=DEVICE_KEY, why="engines that share the trainer's devices are not part of this project",
        instead=f"{DEVICE_KEY}=false {MODE_KEY}=broadcast",
    ),
    Route(
        ANY, "sglang", False, "ipc",
        key=MODE_KEY, why="ipc needs trainer and engine on one device", instead=f"{MODE_KEY}=broadcast",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Limit:
    """A key whose schema allows more than this project supports."""

    key: str
    supported: tuple[Any, ...]
    why: str

    @property
    def instead(self) -> str:
        return f"{self.key}={yaml_text(self.supported[0])}".replace("'", "")


_SERVER = "policy.generation.sglang_cfg.sglang_server_config"
LIMITS = (
    Limit(
        f"{_SERVER}.pause_generation_mode", ("retract", "abort"), "in_place would keep KV entries of the old weights"
    ),
    Limit(f"{_SERVER}.pp_size", (1,), "the weight-update group counts tensor-parallel engine ranks only"),
    Limit(f"{_SERVER}.needs_offload", (False,), "engines on their own devices have nothing to offload for"),
    Limit(f"{_SERVER}.cpu_weight_backup", (False,), "engines on their own devices have nothing to back up for"),
    Limit("policy.generation.sglang_cfg.quantization.scheme", ("bf16",), "the policy's weights are sent as they are"),
    Limit("policy.generation.top_p", (1.0,), "the trainer's log-probs are those of the whole vocabulary"),
    Limit("policy.generation.top_k", (None,), "the trainer's log-probs are those of the whole vocabulary"),
    Limit("policy.dtensor_cfg.context_parallel_size", (1,), "the policy is sharded by FSDP2 and tensor parallelism"),
    Limit("policy.dtensor_cfg.sequence_parallel", (False,), "activations are whole on every tensor-parallel rank"),
)


def policy_backend(policy: Mapping[str, Any]) -> str:
    if _get(policy, "megatron_cfg.enabled", False):
        return "megatron"
    if not _get(policy, "dtensor_cfg.enabled", True):
        return "none"
    return "dtensor_v2" if _get(policy, "dtensor_cfg._v2", True) else "dtensor_v1"


def find_route(policy: str, generation: str, colocated: bool, transfer_mode: str) -> Route | None:
    """The deciding row; None for values that the schema refuses."""
    asked = (policy, generation, colocated, transfer_mode)
    for route in ROUTES:
        row = (route.policy, route.generation, route.colocated, route.transfer_mode)
        if all(want is ANY or want == got for want, got in zip(row, asked, strict=True)):
            return route
    return None


def check_support(config: Mapping[str, Any]) -> None:
    """Refuse what cannot run.

    Args:
        config: nested plain mapping with the key `policy`; what is absent counts as its default.

    Raises:
        ConfigError: key, value, reason and nearest supported setting, one line each.
    """
    policy = config.get("policy")
    if not isinstance(policy, Mapping):
        return
    lines = []
    route = find_route(
        policy_backend(policy),
        _get(config, "policy.generation.backend", "sglang"),
        _get(config, DEVICE_KEY, False),
        _get(config, MODE_KEY, "broadcast"),
    )
    if route is not None and route.transport is None:
        value = _get(config, route.key, _DEFAULTS.get(route.key))
        lines.append(refusal(route.key, value, f"not supported ({route.why}); set {route.instead}"))
    for limit in LIMITS:
        value = _get(config, limit.key, limit.supported[0])
        if value not in limit.supported:
            lines.append(refusal(limit.key, value, f"not supported ({limit.why}); set {limit.instead}"))
    if lines:
        raise ConfigError(lines)


_DEFAULTS = {DEVICE_KEY: False, MODE_KEY: "broadcast"}


def matrix_markdown() -> str:
    """The table of the README."""
    rows = ["| policy | generation | colocated | transfer mode | weights travel by |", "|---|---|---|---|---|"]
    for route in ROUTES:
        cells = [
            "any" if cell is ANY else str(cell).lower()
            for cell in (route.policy, route.generation, route.colocated, route.transfer_mode)
        ]
        how = route.transport or f"refused: {route.why}; set `{route.instead}`"
        rows.append("| " + " | ".join([*cells, how]) + " |")
    return "\n".join(rows)


def _get(config: Mapping[str, Any], dotted: str, default: Any) -> Any:
    node: Any = config
    for part in dotted.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node
