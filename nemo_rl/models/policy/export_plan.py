"""From a model before sharding and the headers of its checkpoint to the manifest of what is exported.

transformers 5 loads some checkpoints through conversions: towers renamed, experts fused, matrices transposed. It also
reverses them; here that is asked of the meta twin once, and what comes out is compared with what is on disk, since
engines load the disk's names, shapes and layout and skip what they do not know.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
    revert_weight_conversion,
)

from nemo_rl.distributed.weight_transfer.engine_rules import FLOAT32_TENSORS
from nemo_rl.distributed.weight_transfer.manifest import Manifest, TensorSpec, listed

Headers = Mapping[str, tuple[tuple[int, ...], str]]
"""Checkpoint name -> shape, and dtype as safetensors names it: `BF16`."""

_FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True)
class ExportPlan:
    manifest: Manifest
    twin: PreTrainedModel
    """The model on meta, neither sharded nor wrapped. Conversions ask its class, its config and its shapes: sharding
    renames the class, after which transformers no longer knows the conversions.
    """

    def to_checkpoint(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Module tensors that belong together -> checkpoint tensors, in the model's own layout."""
        return revert_weight_conversion(self.twin, tensors)


def read_headers(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Names, shapes and dtypes of a safetensors checkpoint; no weight is read."""
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    headers = {}
    for file in sorted(files):
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 it is no mapping
                piece = opened.get_slice(name)
                headers[name] = (tuple(piece.get_shape()), str(piece.get_dtype()))
    return headers


def make_export_plan(twin: PreTrainedModel, headers: Headers, dtype: torch.dtype) -> ExportPlan:
    """Plan what is exported of `twin`, floating tensors in `dtype`.

    Rules for what differs from the checkpoint on disk: a tensor that a conversion transposes is transposed back; any
    float dtype is cast; a tied weight goes under the one name that is saved; what the disk holds and the model has no
    place for stays as the engines loaded it. Float32 stay the tensors that engines hold so, and those that the
    checkpoint has in float32 among narrower ones.

    Raises:
        ValueError: a name, shape or dtype that no rule covers, by name.
    """
    state = {name: tensor for name, tensor in twin.state_dict().items() if name not in twin.all_tied_weights_keys}
    conversions = _Conversions(twin)
    is_mixed = any(on_disk in ("BF16", "F16") for _, on_disk in headers.values())
    float32 = {name for name, (_, on_disk) in headers.items() if is_mixed and on_disk == "F32"}
    specs, problems = [], []
    for sources in conversions.groups(list(state)):
        for name, tensor in revert_weight_conversion(twin, {source: state[source] for source in sources}).items():
            is_exact = name in float32 or FLOAT32_TENSORS.search(name) is not None
            floating = torch.float32 if is_exact else dtype
            wire_dtype = floating if tensor.is_floating_point() else tensor.dtype
            spec = TensorSpec(name, tuple(tensor.shape), wire_dtype, sources)
            try:
                specs.append(_reconciled(spec, headers, conversions))
            except ValueError as error:
                problems.append(str(error))
    problems += conversions.lost(headers, {spec.name for spec in specs}, twin.state_dict())
    if problems:
        raise ValueError(
            f"policy.model_name: {type(twin).__name__} cannot be sent as its checkpoint has it: {listed(problems)}"
        )
    return ExportPlan(Manifest(tuple(specs)), twin)


class _Conversions:
    """The transforms with which a model was loaded, in both directions."""

    def __init__(self, twin: PreTrainedModel):
        self._twin = twin
        used: list[WeightTransform] = twin._weight_conversions  # type: ignore[assignment]
        self._forward = _split(used)
        self._backward = _split([transform.reverse_transform() for transform in reversed(used)])

    def groups(self, names: list[str]) -> list[tuple[str, ...]]:
        """Module names that have to be reversed together, in the order of their first."""
        groups: dict[str, list[str]] = {}
        for name in names:
            target, _ = rename_source_key(name, *self._backward, reverse=True)
            groups.setdefault(target, []).append(name)
        return [tuple(group) for group in groups.values()]

    def may_transpose(self, sources: tuple[str, ...]) -> bool:
        return any(
            isinstance(operation, Transpose)
            for converter in self._backward[1]
            for operation in converter.operations
            if any(converter.rename_source_key(name)[1] is not None for name in sources)
        )

    def lost(self, headers: Headers, sent: set[str], state: Mapping[str, torch.Tensor]) -> list[str]:
        """Complaints about tensors on disk that the model loads, yet would not send under that name."""
        prefix = self._twin.base_model_prefix
        tied = self._twin.all_tied_weights_keys
        complaints = []
        for name in headers.keys() - sent:
            target, pattern = rename_source_key(name, *self._forward, prefix, dict(state))
            if target in state and target not in tied and pattern is None:
                complaints.append(f"{name}: on disk and loaded as {target}, but not among what is sent")
        return sorted(complaints)


def _split(transforms: list[WeightTransform]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    return (
        [transform for transform in transforms if isinstance(transform, WeightRenaming)],
        [transform for transform in transforms if isinstance(transform, WeightConverter)],
    )


def _reconciled(spec: TensorSpec, headers: Headers, conversions: _Conversions) -> TensorSpec:
    """The spec as the disk has it; raises ValueError when no rule leads there."""
    if spec.name not in headers:
        raise ValueError(f"{spec.describe()}: the checkpoint holds no such name")
    shape, on_disk = headers[spec.name]
    if spec.dtype.is_floating_point != (on_disk in _FLOAT_DTYPES):
        raise ValueError(f"{spec.describe()}: the checkpoint holds it as {on_disk}")
    if shape == spec.shape:
        return spec
    is_swapped = len(shape) > 1 and shape == (*spec.shape[:-2], spec.shape[-1], spec.shape[-2])
    if is_swapped and conversions.may_transpose(spec.sources):
        return TensorSpec(spec.name, shape, spec.dtype, spec.sources, transposed=True)
    raise ValueError(f"{spec.describe()}: the checkpoint holds it as {list(shape)}")
