"""Keys that say something and change nothing, because what they belong to is off."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from nemo_rl.config.errors import refusal
from nemo_rl.config.schema import MasterConfig, ReasoningGymDataConfig, Section


@dataclass(frozen=True)
class IdleKeys:
    prefix: str
    section: Section
    on: bool
    """Whether the section's keys have an effect."""
    switch: str
    """What to set for that."""
    only: frozenset[str] = field(default_factory=frozenset)
    """Names in the schema; empty: all."""


def idle_lines(config: MasterConfig) -> Iterator[str]:
    """One line per key that has no effect and differs from its default: a section may stand there whole, switched off."""
    for idle in _sections(config):
        for name, described in type(idle.section).model_fields.items():
            value = idle.section.model_dump()[name]
            if not idle.on and (not idle.only or name in idle.only) and value != described.default:
                key = f"{idle.prefix}.{described.alias or name}"
                yield refusal(key, value, f"without effect here; set {idle.switch}")


def _sections(config: MasterConfig) -> Iterator[IdleKeys]:
    lora, sglang, loss = config.policy.dtensor_cfg.lora_cfg, config.policy.generation.sglang_cfg, config.loss_fn
    tolerance, router = sglang.sglang_fault_tolerance_config, sglang.sglang_router_config
    prefix = "policy.dtensor_cfg.lora_cfg"
    # Not `use_triton`: NeMo-RL's configs have it true, beside `enabled: false`.
    names = frozenset(type(lora).model_fields) - {"use_triton"}
    yield IdleKeys(prefix, lora, lora.enabled, f"{prefix}.enabled=true", names)
    prefix = "policy.generation.sglang_cfg.sglang_fault_tolerance_config"
    yield IdleKeys(prefix, tolerance, tolerance.use_fault_tolerance, f"{prefix}.use_fault_tolerance=true")
    prefix = "policy.generation.sglang_cfg.sglang_router_config"
    names = frozenset({"cache_threshold", "balance_abs_threshold", "balance_rel_threshold"})
    yield IdleKeys(prefix, router, router.policy == "cache_aware", f"{prefix}.policy=cache_aware", names)
    key = "loss_fn.reference_policy_kl_penalty"
    names = frozenset({"reference_policy_kl_type"})
    yield IdleKeys("loss_fn", loss, loss.reference_policy_kl_penalty > 0, f"{key} above 0", names)
    key = "loss_fn.use_importance_sampling_correction"
    names = frozenset({"truncated_importance_sampling_ratio"})
    # null asks for no bound, and without the weights there is none.
    on = loss.use_importance_sampling_correction or loss.truncated_importance_sampling_ratio is None
    yield IdleKeys("loss_fn", loss, on, f"{key}=true", names)
    verified = not isinstance(config.data, ReasoningGymDataConfig)
    yield IdleKeys("env.math", config.env.math, verified, "data.dataset_name to another than reasoning_gym")
