"""From a model before sharding and the headers of its checkpoint to the manifest of what is exported.

transformers 5 loads some checkpoints through conversions: towers renamed, experts fused, matrices transposed. It also
reverses them; here that is asked of the meta twin once, and what comes out is compared with what is on disk, since
engines load the disk's names, shapes and layout and skip what they do not know.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from transformers import PreTrainedModel

from nemo_rl.distributed.weight_transfer.engine_rules import FLOAT32_TENSORS
from nemo_rl.distributed.weight_transfer.manifest import Manifest, TensorSpec, join_of, listed
from nemo_rl.models.policy.conversions import TensorGroup, group_tensors, lost_names

Headers = Mapping[str, tuple[tuple[int, ...], str]]
"""Checkpoint name -> shape, and dtype as safetensors names it: `BF16`."""

_FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_INTEGER_DTYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class LowRankUpdate:
    """What an adapter adds to a weight `[out, in]`: scale * B A, by names of parameters without wrappers."""

    a: str
    """`[rank, in]`"""
    b: str
    """`[out, rank]`"""
    scale: float

    def merged(self, weight: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """`tensors[weight]` with the update, in its dtype and place.

        Nothing is added while B is zero: a weight of -0.0 would become 0.0, and the engines' checksums would differ.
        """
        base, a, b = tensors[weight], tensors[self.a], tensors[self.b]
        return base.add_((b @ a).mul_(self.scale)) if b.any() else base


@dataclass(frozen=True)
class ExportPlan:
    manifest: Manifest
    groups: tuple[TensorGroup, ...]
    """What the manifest's tensors are made of, in its order."""
    twin: PreTrainedModel
    """The model on meta, neither sharded nor wrapped. Sharding renames the class, after which transformers no longer
    knows the conversions.
    """
    left_out: frozenset[str] = frozenset()
    """Sources of what is not sent."""
    updates: Mapping[str, LowRankUpdate] = field(default_factory=dict)
    """Of sources that have an adapter."""

    @cached_property
    def parts(self) -> tuple[tuple[TensorGroup, list[TensorSpec]], ...]:
        """Each group with what it becomes, in the order of the manifest."""
        return tuple(zip(self.groups, self.manifest.by_sources(), strict=True))

    def without(self, frozen: Collection[str]) -> "ExportPlan":
        """What is made of other parameters too, of buffers, or with adapters; and what engines join with it, since half is
        not enough. The same object for the same names.
        """
        names = frozenset(frozen)
        if names not in self._without:
            self._without[names] = self._made_without(names) if names else self
        return self._without[names]

    @cached_property
    def _without(self) -> dict[frozenset[str], "ExportPlan"]:
        return {}

    def _made_without(self, frozen: frozenset[str]) -> "ExportPlan":
        pairs = self.parts
        moves = [not set(group.sources) <= frozen - self.updates.keys() for group, _ in pairs]
        joins = {
            join_of(spec.name) for (_, specs), moving in zip(pairs, moves, strict=True) if moving for spec in specs
        }
        kept = [
            pair
            for pair, moving in zip(pairs, moves, strict=True)
            if moving or any(join_of(spec.name) in joins - {None} for spec in pair[1])
        ]
        sent = {source for group, _ in kept for source in group.sources}
        left_out = frozenset(source for group in self.groups for source in group.sources if source not in sent)
        specs = tuple(spec for _, specs in kept for spec in specs)
        return replace(
            self, manifest=Manifest(specs), groups=tuple(group for group, _ in kept), left_out=self.left_out | left_out
        )


def is_plain(group: TensorGroup, specs: Sequence[TensorSpec]) -> bool:
    """Whether the tensor is its source as it is."""
    return group.converter is None and not specs[0].transposed


def make_export_plan(twin: PreTrainedModel, headers: Headers, dtype: torch.dtype) -> ExportPlan:
    """Plan what is exported of `twin`, floating tensors in `dtype`.

    Rules for what differs from the checkpoint on disk: a tensor that a conversion transposes is transposed back; any
    float dtype is cast, integers take the disk's width; a tied weight goes under the one name that is saved; what the disk holds and the model has no
    place for stays as the engines loaded it. Float32 stay the tensors that engines hold so, and those that the
    checkpoint has in float32 among narrower ones.

    Raises:
        ValueError: a name, shape or dtype that no rule covers, by name.
    """
    state = {name: tensor for name, tensor in twin.state_dict().items() if name not in twin.all_tied_weights_keys}
    is_mixed = any(on_disk in ("BF16", "F16") for _, on_disk in headers.values())
    float32 = {name for name, (_, on_disk) in headers.items() if is_mixed and on_disk == "F32"}
    groups = group_tensors(twin, list(state))
    specs, problems, made = [], [], set()
    for group in groups:
        for name, tensor in group.to_checkpoint(state, twin).items():
            made.add(name)
            is_exact = name in float32 or FLOAT32_TENSORS.search(name) is not None
            floating = torch.float32 if is_exact else dtype
            wire_dtype = floating if tensor.is_floating_point() else tensor.dtype
            spec = TensorSpec(name, tuple(tensor.shape), wire_dtype, group.sources)
            try:
                specs.append(_reconciled(spec, headers, group))
            except ValueError as error:
                problems.append(str(error))
    problems += lost_names(twin, list(headers), made)
    if problems:
        raise ValueError(
            f"policy.model_name: {type(twin).__name__} cannot be sent as its checkpoint has it: {listed(problems)}"
        )
    return ExportPlan(Manifest(tuple(specs)), tuple(groups), twin)


def _reconciled(spec: TensorSpec, headers: Headers, group: TensorGroup) -> TensorSpec:
    """The spec as the disk has it; raises ValueError when no rule leads there."""
    if spec.name not in headers:
        raise ValueError(f"{spec.describe()}: the checkpoint holds no such name")
    shape, on_disk = headers[spec.name]
    if spec.dtype in _INTEGER_DTYPES.values() and on_disk in _INTEGER_DTYPES:
        spec = replace(spec, dtype=_INTEGER_DTYPES[on_disk])
    elif (spec.dtype == torch.bool) != (on_disk == "BOOL") or spec.dtype.is_floating_point != (
        on_disk in _FLOAT_DTYPES
    ):
        raise ValueError(f"{spec.describe()}: the checkpoint holds it as {on_disk}")
    if shape == spec.shape:
        return spec
    is_swapped = len(shape) > 1 and shape == (*spec.shape[:-2], spec.shape[-1], spec.shape[-2])
    if is_swapped and group.transposes:
        return replace(spec, shape=shape, transposed=True)
    raise ValueError(f"{spec.describe()}: the checkpoint holds it as {list(shape)}")
