"""LoRA: which layers get an adapter, and peft's adapters in a model.

Adapters are injected before sharding; no wrapper of peft stands around the model. What leaves the trainer has them merged
into the weights (export.py), so names on the wire and in exports are those of the model without them.
"""

import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from nemo_rl.config.schema import LoRAConfig
from nemo_rl.distributed.weight_transfer.manifest import listed
from nemo_rl.models.policy.export_plan import LowRankUpdate
from nemo_rl.models.policy.utils import find_blocks

if TYPE_CHECKING:
    from peft import LoraConfig

# peft is imported in the functions: it takes seconds, and most runs have no adapter.

logger = logging.getLogger(__name__)

_KEY = "policy.dtensor_cfg.lora_cfg"
_ADAPTER = "default"


def find_targets(model: PreTrainedModel, config: LoRAConfig) -> list[str]:
    """Names of the linear layers that get an adapter, in the order of the model.

    Never the output head, nor a layer that shares its weight. Subclasses of `nn.Linear` are left out: their forward may be
    another (a router that returns a tuple).

    Raises:
        ValueError: a pattern matches nothing, or no layer is left.
    """
    modules = dict(model.named_modules())
    shared = set(model.all_tied_weights_keys) | set(model.all_tied_weights_keys.values())
    linear = [
        name
        for name, module in modules.items()
        if type(module) is nn.Linear and module is not model.get_output_embeddings() and f"{name}.weight" not in shared
    ]
    kinds = ", ".join(sorted({_leaf(name) for name in linear}))
    for pattern in config.target_modules:
        if not _matching(linear, [pattern]):
            raise ValueError(
                f"{_KEY}.target_modules: got {pattern!r}, which no linear layer is called; allowed: {kinds}, whole names, "
                f"and wildcards; the output head takes no adapter{_experts_text(model)}"
            )
    for pattern in config.exclude_modules:
        if not _matching(modules, [pattern]):
            raise ValueError(
                f"{_KEY}.exclude_modules: got {pattern!r}, which no module of the model is called; allowed: {kinds}, whole "
                "names, and wildcards"
            )
    in_blocks = {id(module) for block in find_blocks(model) for module in block.modules()}
    asked = _matching(linear, config.target_modules) or [name for name in linear if id(modules[name]) in in_blocks]
    if not asked:
        raise ValueError(f"{_KEY}.match_all_linear: got true; {type(model).__name__} has no nn.Linear in its blocks")
    excluded = set(_matching(asked, config.exclude_modules))
    if not set(asked) - excluded:
        raise ValueError(f"{_KEY}.exclude_modules: got {config.exclude_modules}, which leaves no layer of the targets")
    return [name for name in asked if name not in excluded]


def _matching(names: Iterable[str], patterns: Collection[str]) -> list[str]:
    """A pattern stands for a whole name or for the end of one, after a dot."""
    return [name for name in names if any(fnmatchcase(f".{name}", f"*.{pattern}") for pattern in patterns)]


def _experts_text(model: nn.Module) -> str:
    """A note on what looks like a target and is none."""
    fused = {_leaf(name) for name, parameter in model.named_parameters() if parameter.ndim == 3 and ".experts." in name}
    return f", nor do the fused experts ({', '.join(sorted(fused))}), which are no linear layers" if fused else ""


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def add_adapters(model: PreTrainedModel, config: LoRAConfig) -> dict[str, LowRankUpdate]:
    """Inject adapters and freeze everything else, in place. Their values are undefined: `init_adapters`.

    Returns:
        Name of each weight that has an adapter -> what is added to it.

    Raises:
        ValueError: a pattern matches no layer, or peft would put adapters elsewhere.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    targets = find_targets(model, config)
    on_meta = next(model.parameters()).is_meta
    if on_meta:  # rank 0 does the same to the weights that it has read
        logger.info(
            "%s: %d linear layers get an adapter; the output head does not%s", _KEY, len(targets), _experts_text(model)
        )
    try:
        inject_adapter_in_model(
            peft_config(model, targets, config), model, adapter_name=_ADAPTER, low_cpu_mem_usage=on_meta
        )
    except ValueError as error:
        raise ValueError(f"{_KEY}.target_modules: peft refuses {listed(targets)} ({error})") from error
    wrapped = {name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    if wrapped != set(targets):
        # Names that transformers 4 gave to experts mean the fused parameters to peft, wherever they stand.
        patterns = {re.sub(r"\.\d+\.", ".*.", name) for name in set(targets) - wrapped}
        raise ValueError(
            f"{_KEY}.target_modules: in a {type(model).__name__} peft takes names for fused experts that are linear "
            f"layers here; set {_KEY}.exclude_modules=[{','.join(sorted(patterns))}]"
        )
    return {
        f"{name}.weight": LowRankUpdate(
            a=f"{name}.lora_A.{_ADAPTER}.weight", b=f"{name}.lora_B.{_ADAPTER}.weight", scale=config.alpha / config.dim
        )
        for name in targets
    }


def peft_config(model: nn.Module, targets: Collection[str], config: LoRAConfig) -> "LoraConfig":
    """peft's name for the same adapters.

    Targets go by the last part of their names where that means the same layers: the form that other programs read.
    """
    from peft import LoraConfig

    leaves = {_leaf(name) for name in targets}
    meant = {name for name, _ in model.named_modules() if _leaf(name) in leaves}
    return LoraConfig(
        r=config.dim,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=sorted(leaves if meant == set(targets) else targets),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )


@torch.no_grad()
def init_adapters(model: nn.Module, updates: Mapping[str, LowRankUpdate], method: str, seed: int) -> None:
    """Fill A by `lora_A_init` from the seed alone, B with zeros."""
    generator = torch.Generator().manual_seed(seed)
    for update in updates.values():
        a = model.get_parameter(update.a)
        if method == "xavier":
            nn.init.xavier_normal_(a, generator=generator)
        elif method == "uniform":
            nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        else:
            nn.init.normal_(a, std=1 / a.shape[0], generator=generator)
        nn.init.zeros_(model.get_parameter(update.b))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within, the model is its base. Only without gradient."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]

    def switch(off: bool) -> None:
        for layer in layers:
            # Not `enable_adapters`: it takes requires_grad away meanwhile, and FSDP2 keeps the flag that a parameter has
            # when it is first gathered.
            layer._disable_adapters = off

    switch(True)
    try:
        yield
    finally:
        switch(False)
