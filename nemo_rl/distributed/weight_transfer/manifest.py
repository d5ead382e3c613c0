"""What a refit sends, decided once: each tensor's name, shape and dtype, and where buckets may end."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from nemo_rl.distributed.weight_transfer.engine_rules import JOINED_TENSORS
from nemo_rl.distributed.weight_transfer.errors import ManifestError

_LAYER = re.compile(r"^(.*?\.\d+)\.")
"""`model.layers.3.mlp.up_proj.weight` -> `model.layers.3`."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor on the wire, as the checkpoint on disk has it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[str, ...]
    """The module's parameters and buffers that it is made of, by their names without wrappers."""
    transposed: bool = False
    """Whether the checkpoint has the last two dimensions the other way round."""

    @cached_property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def num_bytes(self) -> int:
        return self.num_values * self.dtype.itemsize

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Of a contiguous tensor, in values."""
        return torch.empty(self.shape, device="meta").stride()

    def describe(self) -> str:
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Manifest:
    """Every tensor of a refit, in the order in which it is sent. Equal on every rank."""

    specs: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs)

    @cached_property
    def largest_bytes(self) -> int:
        return max((spec.num_bytes for spec in self.specs), default=0)

    def by_sources(self) -> Iterator[list[TensorSpec]]:
        """The tensors that are made together of the same sources, in order."""
        for _, specs in itertools.groupby(self.specs, key=lambda spec: spec.sources):
            yield list(specs)

    def bucket_lengths(self, buffer_size_bytes: int) -> list[int]:
        """How many tensors each bucket holds, for buckets of at most `buffer_size_bytes`.

        A layer that fits into a bucket is not split. A larger one is split, but never between tensors that the engine
        joins within one call; what is larger than a bucket even so has a bucket of its own.
        """
        if buffer_size_bytes not in self._lengths:
            self._lengths[buffer_size_bytes] = self._bucket_lengths(buffer_size_bytes)
        return self._lengths[buffer_size_bytes]

    def _bucket_lengths(self, buffer_size_bytes: int) -> list[int]:
        lengths: list[int] = []
        num, size_bytes = 0, 0
        for unit in self._units(buffer_size_bytes):
            unit_bytes = sum(spec.num_bytes for spec in unit)
            if num and size_bytes + unit_bytes > buffer_size_bytes:
                lengths.append(num)
                num, size_bytes = 0, 0
            num, size_bytes = num + len(unit), size_bytes + unit_bytes
        return [*lengths, num] if num else lengths

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raise ManifestError when a tensor about to be sent is not what was planned."""
        spec = self._by_name.get(name)
        if spec is None:
            raise ManifestError(f"{name} was to be sent; the manifest does not hold it")
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise ManifestError(
                f"{name} was to be sent as {list(tensor.shape)} {tensor.dtype}; the manifest holds {spec.describe()}"
            )

    def check_complete(self, names: Sequence[str]) -> None:
        """Raise ManifestError unless `names` are those of the manifest, each once."""
        counts = Counter(names)
        absent = [spec.name for spec in self.specs if not counts[spec.name]]
        if absent:
            raise ManifestError(f"{len(absent)} tensors of the manifest were not sent: {listed(absent)}")
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ManifestError(f"{len(twice)} tensors were sent more than once: {listed(twice)}")

    @cached_property
    def _lengths(self) -> dict[int, list[int]]:
        """By size, of every refit the same."""
        return {}

    @cached_property
    def _by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.specs}

    def _units(self, buffer_size_bytes: int) -> Iterator[list[TensorSpec]]:
        """Runs of tensors that one bucket must hold whole."""
        for _, layer in itertools.groupby(self.specs, key=_layer_of):
            specs = list(layer)
            if sum(spec.num_bytes for spec in specs) <= buffer_size_bytes:
                yield specs
            else:
                yield from _joined_runs(specs)


def listed(names: Sequence[str], limit: int = 8) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _layer_of(spec: TensorSpec) -> str:
    """The layer's prefix; a tensor outside of layers stands for itself."""
    match = _LAYER.match(spec.name)
    return match.group(1) if match else spec.name


def _joined_runs(specs: list[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Single tensors, but from the first to the last of those that the engine joins one run."""
    last_of_run: dict[str, int] = {}
    joins = [join_of(spec.name) for spec in specs]
    for index, join in enumerate(joins):
        if join is not None:
            last_of_run[join] = index
    start, end = 0, 0
    for index, join in enumerate(joins):
        end = max(end, index, last_of_run[join] if join is not None else index)
        if index == end:
            yield specs[start : index + 1]
            start = index + 1


def join_of(name: str) -> str | None:
    """What the tensors that the engine joins with this one have in common; None: it joins none."""
    match = next((match for pattern in JOINED_TENSORS if (match := pattern.match(name))), None)
    return match and f"{match.group(1)} {match.re.pattern}"
