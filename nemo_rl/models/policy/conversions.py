"""transformers' load-time conversions, reversed one group of tensors at a time.

`revert_weight_conversion` does the same for a whole state dict at once, which here never exists: some of its renamings
remember what they have seen, so they are asked once, for all names, and the answers are kept.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)


@dataclass(frozen=True)
class TensorGroup:
    """Module tensors that one checkpoint tensor, or one set of them, is made of."""

    sources: tuple[str, ...]
    patterns: tuple[str, ...]
    """Which of the converter's patterns each source matched."""
    target: str
    converter: WeightConverter | None
    """None: a tensor that is renamed at most."""

    @property
    def transposes(self) -> bool:
        return self.converter is not None and any(
            isinstance(operation, Transpose) for operation in self.converter.operations
        )

    def to_checkpoint(self, tensors: Mapping[str, torch.Tensor], twin: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Checkpoint tensors by name, out of whole module tensors; `twin` is asked for config and shapes."""
        if self.converter is None:
            return {self.target: tensors[self.sources[0]]}
        converter = copy.deepcopy(self.converter)
        for source, pattern in zip(self.sources, self.patterns, strict=True):
            value: Any = tensors[source]  # declared as a future, which it is only while loading
            converter.add_tensor(self.target, source, pattern, value)
        made = converter.convert(self.target, model=twin, config=twin.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def group_tensors(twin: PreTrainedModel, names: Sequence[str]) -> list[TensorGroup]:
    """Group module tensors as they have to be reversed, in the order of each group's first.

    Raises:
        ValueError: two tensors would go under one name.
    """
    renamings, converters = _split([transform.reverse_transform() for transform in reversed(_transforms(twin))])
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    # In this order, since a renaming may depend on what came before.
    matches = {name: _checkpoint_name(name, renamings, converters) for name in sorted(names, key=dot_natural_key)}
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(matches[name][0], []).append(name)
    groups = []
    for target, sources in members.items():
        patterns = tuple(pattern for source in sources if (pattern := matches[source][1]) is not None)
        if not patterns and len(sources) > 1:
            raise ValueError(f"policy.model_name: {sources} would all be sent as {target}")
        converter = by_pattern[patterns[0]] if patterns else None
        groups.append(TensorGroup(tuple(sources), patterns, target, converter))
    return groups


def _checkpoint_name(
    name: str, renamings: list[WeightRenaming], converters: list[WeightConverter]
) -> tuple[str, str | None]:
    """The checkpoint's name, and the pattern of the converter that matched: loading renames first, so this does last."""
    converted, pattern = rename_source_key(name, [], converters)
    return rename_source_key(converted, renamings, [])[0], pattern


def lost_names(twin: PreTrainedModel, on_disk: Sequence[str], sent: set[str]) -> list[str]:
    """Complaints about tensors on disk that the model loads as they are, yet does not send."""
    renamings, converters = _split(_transforms(twin))
    state = twin.state_dict()
    complaints = []
    for name in sorted(on_disk, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, twin.base_model_prefix, state)
        is_held = target in state and target not in twin.all_tied_weights_keys
        if is_held and pattern is None and name not in sent:
            complaints.append(f"{name}: on disk and loaded as {target}, but not among what is sent")
    return complaints


def _transforms(twin: PreTrainedModel) -> list[WeightTransform]:
    """Those that loading has used, in that order."""
    used: list[WeightTransform] = twin._weight_conversions  # type: ignore[assignment]
    return used


def _split(transforms: list[WeightTransform]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    return (
        [transform for transform in transforms if isinstance(transform, WeightRenaming)],
        [transform for transform in transforms if isinstance(transform, WeightConverter)],
    )
