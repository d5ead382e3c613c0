"""Tensor parallelism by the model's own plan, as transformers has it: module or parameter name -> style.

Every parameter that a style names becomes a DTensor on the tensor-parallel axis, before FSDP2 shards what is left of it.
The others stay whole: activations outside of the planned modules are the same on every rank of a tensor-parallel group,
and so are these parameters' gradients.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    TensorParallelLayer,
    replace_layer_number_by_wildcard,
)

from nemo_rl.distributed.weight_transfer.manifest import listed

_KEY = "policy.dtensor_cfg.tensor_parallel_size"
_COLUMNS = frozenset({"colwise", "colwise_gather_output", "colwise_rep"})
_ROWS = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
_EMBEDDING = "embedding_rowwise"
_EXPERTS = "moe_tp_experts"
_STACK = "packed_colwise"
"""Gate and up projections of all experts, stacked."""
_PARTIAL = "replicated_with_grad_allreduce"
_BEHIND = {"q_norm": "q_proj", "k_norm": "k_proj", "act_fn": "up_proj"}
"""Modules that some plans leave out, and the projection that they stand behind: where it is divided, a rank's gradient of
their parameters is a part."""
_UNFIT = frozenset(
    {"DogeForCausalLM", "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration", "Gemma4ForConditionalGeneration"}
)
"""Classes whose forward pass fails, or gives other log-probs, by the plan that transformers has for them."""
_HEADS = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")
"""Of a model's config: what a rank has a part of, where the width of a projection alone would divide further."""


@contextmanager
def _local_parameters(module: nn.Module, gradient: Placement | None = None) -> Iterator[None]:
    """Within, the module computes with this rank's parts. `gradient` is the placement of their gradients, if not theirs."""
    held = {name: value for name, value in module.named_parameters(recurse=False) if isinstance(value, DTensor)}
    grads = None if gradient is None else [gradient]
    local: dict[str, Any] = {name: value.to_local(grad_placements=grads) for name, value in held.items()}
    module._parameters.update(local)
    try:
        yield
    finally:
        module._parameters.update(held)


class _PartialGradient(TensorParallelLayer):
    """A norm over the heads of one rank: every rank adds its heads' part to the gradient.

    FSDP2 sums the parts when it reduces gradients, once a step. The hook that transformers has for it sums what was
    accumulated before, too, and sees no gradient of FSDP2's.
    """

    def context_around_forward(self, module: nn.Module, mesh: DeviceMesh) -> Any:
        return _local_parameters(module, Partial())


class _VocabularyEmbedding(TensorParallelLayer):
    """Each rank looks up the ids that it holds. DTensor would take `padding_idx` for a row of every rank's part."""

    def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
        num_rows = module.weight.shape[0] // mesh.size()
        start = num_rows * mesh.get_local_rank()
        if module.padding_idx is not None:
            is_held = start <= module.padding_idx < start + num_rows
            module.padding_idx = module.padding_idx - start if is_held else None
        look_up = module.forward

        def forward(ids: torch.Tensor) -> torch.Tensor:
            others = (ids < start) | (ids >= start + num_rows)
            with _local_parameters(module):
                found = look_up((ids - start).masked_fill(others, 0)).masked_fill(others[..., None], 0.0)
            summed: torch.Tensor = DTensor.from_local(found, mesh, [Partial()], run_check=False).redistribute(
                placements=[Replicate()]
            )
            local: torch.Tensor = summed.to_local()  # type: ignore[attr-defined]
            return local

        module.forward = forward
        return module


_STYLES: dict[str, TensorParallelLayer] = {
    **{name: ALL_PARALLEL_STYLES[name] for name in (*_COLUMNS, *_ROWS, _EXPERTS, "mla_kv_a_proj")},
    _EMBEDDING: _VocabularyEmbedding(),
    _PARTIAL: _PartialGradient(),
}
"""Of modules."""


def make_plan(model: PreTrainedModel) -> dict[str, str]:
    """The model's plan, names with `*` for numbers.

    A head that the plan divides keeps its part of the vocabulary: log-probs are computed from there. An embedding that is
    tied to it is divided alike. Norms of heads that the plan forgets get the style that other plans have for them.
    """
    plan = dict(model.tp_plan)
    plan |= {name: _PARTIAL for name, width, module in _behind(model, plan) if _fits_a_head(module, width)}
    names = {module: name for name, module in model.named_modules()}
    head, embedding = names[model.get_output_embeddings()], names[model.get_input_embeddings()]
    is_tied = {f"{head}.weight", f"{embedding}.weight"} in [set(pair) for pair in model.all_tied_weights_keys.items()]
    if head in plan or (is_tied and embedding in plan):
        plan[head] = "colwise"
        if is_tied:
            plan[embedding] = _EMBEDDING
    return plan


def _behind(model: PreTrainedModel, plan: Mapping[str, str]) -> Iterator[tuple[str, int, nn.Module]]:
    """What `_BEHIND` names and the plan does not: generic name, outputs of the divided projection, module."""
    for name, module in model.named_modules():
        parent, _, leaf = name.rpartition(".")
        before = f"{parent}.{_BEHIND.get(leaf)}"
        generic = replace_layer_number_by_wildcard(name)
        is_divided = plan.get(replace_layer_number_by_wildcard(before)) == "colwise"
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
        generic = replace_layer_number_by_wildcard(name)
        if generic in plan and plan[generic] not in _STYLES:
            yield f"{generic}: {plan[generic]}"
    for name, _, _ in _behind(model, plan):
        yield f"{name}: no style"
    for generic, style, module, _, parameter in _planned(model, plan):
        if generic in plan:
            in_experts = plan.get(generic.rpartition(".")[0]) == _EXPERTS and parameter.ndim == 3
            is_known = in_experts and style in {_STACK, *_COLUMNS, *_ROWS}
        elif style == _EMBEDDING:
            is_known = isinstance(module, nn.Embedding)
        else:
            is_known = style not in {_EXPERTS, *_COLUMNS, *_ROWS} or isinstance(module, nn.Linear)
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
            generic = replace_layer_number_by_wildcard(f"{name}.{leaf}")
            style = plan.get(generic) or plan.get(generic.rpartition(".")[0])
            if style is not None:
                yield generic, style, module, leaf, parameter


def _placement(leaf: str, parameter: nn.Parameter, style: str) -> Placement | None:
    """Where the parameter goes on the tensor-parallel axis; None: it stays whole."""
    if style in _COLUMNS:
        return Shard(max(parameter.ndim - 2, 0))
    if style in _ROWS:
        return Replicate() if leaf == "bias" else Shard(parameter.ndim - 1)
    if style == _EMBEDDING:
        return Shard(0)
    if style == _STACK:
        return _StridedShard(1, split_factor=2)
    return Replicate() if isinstance(_STYLES[style], _PartialGradient) else None


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
    for name, module in model.named_modules():
        style_name = plan.get(replace_layer_number_by_wildcard(name))
        if style_name is not None:
            if style_name == "mla_kv_a_proj":  # it reads the width of the part that all heads share
                module.config = model.config.get_text_config()
            _STYLES[style_name].install_forward(module, mesh)
