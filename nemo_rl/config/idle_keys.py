"""Keys that say something and change nothing, because what they belong to is off."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from nemo_rl.config.errors import refusal
from nemo_rl.config.schema import MasterConfig, Section


@dataclass(frozen=True)
class IdleKeys:
    prefix: str
    section: Section
    on: bool
    """Whether the section's keys have an effect."""
    switch: str
    """Of the section: what turns it on. Whoever says that it is off means all of it to be."""
    value: str
    """What to set it to."""
    only: frozenset[str] = field(default_factory=frozenset)
    """Names in the schema; empty: all."""


def idle_lines(config: MasterConfig) -> Iterator[str]:
    """One line per key that has no effect and differs from its default, where nobody said that its section is off."""
    for idle in _sections(config):
        if idle.on or idle.switch in idle.section.model_fields_set:
            continue
        for name, described in type(idle.section).model_fields.items():
            value = idle.section.model_dump()[name]
            if (not idle.only or name in idle.only) and value != described.default:
                key = f"{idle.prefix}.{described.alias or name}"
                yield refusal(key, value, f"without effect here; set {idle.prefix}.{idle.switch}{idle.value}")


def _sections(config: MasterConfig) -> Iterator[IdleKeys]:
    lora, sglang, loss = config.policy.dtensor_cfg.lora_cfg, config.policy.generation.sglang_cfg, config.loss_fn
    tolerance, router = sglang.sglang_fault_tolerance_config, sglang.sglang_router_config
    # Not `use_triton`: NeMo-RL's configs have it true, beside `enabled: false`.
    names = frozenset(type(lora).model_fields) - {"use_triton"}
    yield IdleKeys("policy.dtensor_cfg.lora_cfg", lora, lora.enabled, "enabled", "=true", names)
    prefix = "policy.generation.sglang_cfg.sglang_fault_tolerance_config"
    yield IdleKeys(prefix, tolerance, tolerance.use_fault_tolerance, "use_fault_tolerance", "=true")
    prefix = "policy.generation.sglang_cfg.sglang_router_config"
    names = frozenset({"cache_threshold", "balance_abs_threshold", "balance_rel_threshold"})
    yield IdleKeys(prefix, router, router.policy == "cache_aware", "policy", "=cache_aware", names)
    names = frozenset({"reference_policy_kl_type"})
    on = loss.reference_policy_kl_penalty > 0
    yield IdleKeys("loss_fn", loss, on, "reference_policy_kl_penalty", " above 0", names)
    names = frozenset({"truncated_importance_sampling_ratio"})
    # null asks for no bound, and without the weights there is none.
    on = loss.use_importance_sampling_correction or loss.truncated_importance_sampling_ratio is None
    yield IdleKeys("loss_fn", loss, on, "use_importance_sampling_correction", "=true", names)
