"""What each tensor-parallel style does to the forward pass of a module whose parameters are divided.

Inputs and outputs are plain tensors. transformers has layers for these styles too, but other ones in each version.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

COLUMN = "colwise"
COLUMNS = frozenset({COLUMN, "colwise_gather_output", "colwise_rep"})
ROWS = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
EMBEDDING = "embedding_rowwise"
EXPERTS = "moe_tp_experts"
PARTIAL = "replicated_with_grad_allreduce"


@contextmanager
def _local_parameters(module: nn.Module, gradient: Placement | None = None, *, has_bias: bool = True) -> Iterator[None]:
    """Within, the module computes with this rank's parts, and with no bias if so asked.

    `gradient` is the placement of their gradients, if not theirs.
    """
    held = {name: value for name, value in module.named_parameters(recurse=False) if isinstance(value, DTensor)}
    grads = None if gradient is None else [gradient]
    local: dict[str, Any] = {name: value.to_local(grad_placements=grads) for name, value in held.items()}
    module._parameters.update(local if has_bias else local | {"bias": None})
    try:
        yield
    finally:
        module._parameters.update(held)


def _moved(local: torch.Tensor, mesh: DeviceMesh, before: Placement, after: Placement) -> torch.Tensor:
    """What the ranks hold, placed otherwise; gradients go the way back."""
    placed: Any = DTensor.from_local(local, mesh, [before], run_check=False).redistribute(placements=[after])
    moved: torch.Tensor = placed.to_local()
    return moved


def _shared(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The same tensor; each rank's gradient of it is a part, and they are summed."""
    placed: Any = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    shared: torch.Tensor = placed.to_local(grad_placements=[Partial()])
    return shared


_Forward = Callable[..., torch.Tensor]


def _columns(module: Any, mesh: DeviceMesh, config: Any, *, gather: bool) -> _Forward:
    """Each rank has a part of the outputs."""
    compute = module.forward

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        with _local_parameters(module):
            outputs: torch.Tensor = compute(_shared(inputs, mesh))
        return _moved(outputs, mesh, Shard(-1), Replicate()) if gather else outputs

    return forward


def _rows(module: Any, mesh: DeviceMesh, config: Any, *, split: bool) -> _Forward:
    """Each rank takes a part of the inputs; the bias is added once."""
    compute = module.forward

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        own = _moved(inputs, mesh, Replicate(), Shard(-1)) if split else inputs
        with _local_parameters(module, has_bias=False):
            outputs = _moved(compute(own), mesh, Partial(), Replicate())
        return outputs if module.bias is None else outputs + module.bias.to_local()

    return forward


def _experts(module: Any, mesh: DeviceMesh, config: Any) -> _Forward:
    """Each rank has a part of every expert's inner width."""
    compute = module.forward

    def forward(states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *others: Any) -> torch.Tensor:
        with _local_parameters(module):
            outputs = compute(_shared(states, mesh), chosen, _shared(weights, mesh), *others)
        return _moved(outputs, mesh, Partial(), Replicate())

    return forward


def _latent(module: Any, mesh: DeviceMesh, config: Any) -> _Forward:
    """The end of its outputs, the rotary part, goes straight to each rank's heads."""
    compute, width = module.forward, config.qk_rope_head_dim

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        outputs = compute(inputs)
        return torch.cat([outputs[..., :-width], _shared(outputs[..., -width:], mesh)], dim=-1)

    return forward


def _norm_of_heads(module: Any, mesh: DeviceMesh, config: Any) -> _Forward:
    """Every rank adds its heads' part to the gradient. FSDP2 sums the parts when it reduces gradients, once a step."""
    compute = module.forward

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        with _local_parameters(module, Partial()):
            outputs: torch.Tensor = compute(inputs)
        return outputs

    return forward


def _vocabulary(module: Any, mesh: DeviceMesh, config: Any) -> _Forward:
    """Each rank looks up the ids that it holds. DTensor would take `padding_idx` for a row of every rank's part."""
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
        return _moved(found, mesh, Partial(), Replicate())

    return forward


STYLES: dict[str, Callable[[Any, DeviceMesh, Any], _Forward]] = {
    **{name: partial(_columns, gather=name != COLUMN) for name in COLUMNS},
    **{name: partial(_rows, split=name != "rowwise") for name in ROWS},
    EMBEDDING: _vocabulary,
    EXPERTS: _experts,
    "mla_kv_a_proj": _latent,
    PARTIAL: _norm_of_heads,
}
"""Of modules: module, mesh and the text model's config -> the module's forward pass."""
