"""Tensor parallelism by the model's own plan, as transformers has it: module or parameter name -> style.

Every parameter that a style names becomes a DTensor on the tensor-parallel axis, before FSDP2 shards what is left of it.
The others stay whole: activations outside of the planned modules are the same on every rank of a tensor-parallel group,
and so are these parameters' gradients.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from transformers import PreTrainedModel

from nemo_rl.distributed.weight_transfer.manifest import listed
from nemo_rl.models.policy.parallel_styles import COLUMN, COLUMNS, EMBEDDING, EXPERTS, PARTIAL, ROWS, STYLES

_KEY = "policy.dtensor_cfg.tensor_parallel_size"
_STACK = "packed_colwise"
"""Gate and up projections of all experts, stacked."""
_BEHIND = {"q_norm": "q_proj", "k_norm": "k_proj", "act_fn": "up_proj"}
"""Modules that some plans leave out, and the projection that they stand behind: where it is divided, a rank's gradient of
their parameters is a part."""
_UNFIT = frozenset(
    {"DogeForCausalLM", "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration", "Gemma4ForConditionalGeneration"}
)
"""Classes whose forward pass fails, or gives other log-probs, by the plan that transformers has for them."""
_HEADS = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")
"""Of a model's config: what a rank has a part of, where the width of a projection alone would divide further."""


def _generic(name: str) -> str:
    """`layers.3.mlp` -> `layers.*.mlp`, as plans have it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def make_plan(model: PreTrainedModel) -> dict[str, str]:
    """The model's plan, names with `*` for numbers.

    A head that the plan divides keeps its part of the vocabulary: log-probs are computed from there. An embedding that is
    tied to it is divided alike. Norms of heads that the plan forgets get the style that other plans have for them.
    """
    plan = dict(model.tp_plan)
    plan |= {name: PARTIAL for name, width, module in _behind(model, plan) if _fits_a_head(module, width)}
    names = {module: name for name, module in model.named_modules()}
    head, embedding = names[model.get_output_embeddings()], names[model.get_input_embeddings()]
    is_tied = {f"{head}.weight", f"{embedding}.weight"} in [set(pair) for pair in model.all_tied_weights_keys.items()]
    if head in plan or (is_tied and embedding in plan):
        plan[head] = COLUMN
        if is_tied:
            plan[embedding] = EMBEDDING
    return plan


def _behind(model: PreTrainedModel, plan: Mapping[str, str]) -> Iterator[tuple[str, int, nn.Module]]:
    """What `_BEHIND` names and the plan does not: generic name, outputs of the divided projection, module."""
    for name, module in model.named_modules():
        parent, _, leaf = name.rpartition(".")
        before = f"{parent}.{_BEHIND.get(leaf)}"
        generic = _generic(name)
        is_divided = plan.get(_generic(before)) == COLUMN
        if is_divided and generic not in plan and next(module.parameters(), None) is not None:
            yield generic, len(model.get_parameter(f"{before}.weight")), module


def _fits_a_head(module: nn.Module, width: int) -> bool:
    return all(parameter.ndim == 1 and len(parameter) < width for parameter in module.parameters())


def check_tensor_parallel(model: PreTrainedModel, size: int) -> None:
    """Raise ValueError when `size` ranks cannot share the model, saying which can; a model on meta will do."""
    plan = make_plan(model)
    name = type(model).__name__
    head_and_embedding = {model.get_output_embeddings(), model.get_input_embeddings()}
    if all(module in head_and_embedding for _, _, module, _, _ in _planned(model, plan)):
        raise ValueError(f"{_KEY}: got {size}; transformers has no tensor-parallel plan for {name}; allowed: 1")
    if name in _UNFIT:
        raise ValueError(
            f"{_KEY}: got {size}; {name} does not compute the same by the plan of transformers; allowed: 1"
        )
    if refused := sorted(set(_refused(model, plan))):
        raise ValueError(f"{_KEY}: got {size}; not supported in the plan of {name}: {listed(refused)}; allowed: 1")
    divided = _divided(model, plan)
    if misfits := [f"{what} = {number}" for what, number in divided.items() if number % size]:
        most = math.gcd(*divided.values())
        allowed = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
        raise ValueError(f"{_KEY}: got {size}; must divide what {name} has: {listed(misfits)}; allowed: {allowed}")


def _refused(model: PreTrainedModel, plan: Mapping[str, str]) -> Iterator[str]:
    for name, _ in model.named_modules():
        generic = _generic(name)
        if generic in plan and plan[generic] not in STYLES:
            yield f"{generic}: {plan[generic]}"
    for name, _, _ in _behind(model, plan):
        yield f"{name}: no style"
    for generic, style, module, _, parameter in _planned(model, plan):
        if generic in plan:
            in_experts = plan.get(generic.rpartition(".")[0]) == EXPERTS and parameter.ndim == 3
            is_known = in_experts and style in {_STACK, *COLUMNS, *ROWS}
        elif style == EMBEDDING:
            is_known = isinstance(module, nn.Embedding)
        else:
            is_known = style not in {EXPERTS, *COLUMNS, *ROWS} or isinstance(module, nn.Linear)
        if not is_known:
            yield f"{generic}: {style}"


def _divided(model: PreTrainedModel, plan: Mapping[str, str]) -> dict[str, int]:
    """What every rank gets an equal part of."""
    config = model.config.get_text_config()
    heads = {name: getattr(config, name, None) for name in _HEADS}
    sizes = {name: number for name, number in heads.items() if isinstance(number, int)}
    for generic, style, _, leaf, parameter in _planned(model, plan):
        placement = _placement(leaf, parameter, style)
        if isinstance(placement, _StridedShard):
            sizes[generic] = int(parameter.shape[placement.dim] // placement.split_factor)
        elif isinstance(placement, Shard):
            sizes[generic] = int(parameter.shape[placement.dim])
    return sizes


def _planned(
    model: PreTrainedModel, plan: Mapping[str, str]
) -> Iterator[tuple[str, str, nn.Module, str, nn.Parameter]]:
    """Every parameter that the plan names by itself or by its module: generic name, style, module, leaf, parameter."""
    for name, module in model.named_modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            generic = _generic(f"{name}.{leaf}")
            style = plan.get(generic) or plan.get(generic.rpartition(".")[0])
            if style is not None:
                yield generic, style, module, leaf, parameter


def _placement(leaf: str, parameter: nn.Parameter, style: str) -> Placement | None:
    """Where the parameter goes on the tensor-parallel axis; None: it stays whole."""
    if style in COLUMNS:
        return Shard(max(parameter.ndim - 2, 0))
    if style in ROWS:
        return Replicate() if leaf == "bias" else Shard(parameter.ndim - 1)
    if style == EMBEDDING:
        return Shard(0)
    if style == _STACK:
        return _StridedShard(1, split_factor=2)
    return Replicate() if style == PARTIAL else None


def apply_tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divide a model on meta over the one axis of `mesh`, in place, by a plan that `check_tensor_parallel` has passed.

    Ties are lost: each name has a parameter of its own afterwards.
    """
    plan = make_plan(model)
    for _, style, module, leaf, parameter in list(_planned(model, plan)):
        placement = _placement(leaf, parameter, style)
        if placement is not None:
            part: Any = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
            module.register_parameter(leaf, nn.Parameter(part, requires_grad=parameter.requires_grad))
    config = model.config.get_text_config()
    for name, module in model.named_modules():
        module_style = plan.get(_generic(name))
        if module_style is not None:
            module.forward = STYLES[module_style](module, mesh, config)
