"""The whole model out of its shards, one tensor at a time, under the names that checkpoints use."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from nemo_rl.distributed.weight_transfer.buckets import BucketLayout, FlatBuffers, NamedTensor
from nemo_rl.distributed.weight_transfer.errors import ManifestError
from nemo_rl.distributed.weight_transfer.manifest import TensorSpec
from nemo_rl.distributed.weight_transfer.timeline import Timeline
from nemo_rl.models.policy.conversions import TensorGroup
from nemo_rl.models.policy.export_plan import ExportPlan, LowRankUpdate, is_plain
from nemo_rl.models.policy.gather import Gather, gather_to_rank0
from nemo_rl.models.policy.model_state import ModelState


def dtensor_params_generator(
    model: PreTrainedModel,
    plan: ExportPlan,
    *,
    state: ModelState | None = None,
    layouts: Sequence[BucketLayout] | None = None,
    buffers: FlatBuffers | None = None,
    device: torch.device | None = None,
    negated: bool = False,
    timeline: Timeline | None = None,
) -> Iterator[NamedTensor]:
    """Yield each tensor of the manifest once, in its order: (checkpoint name, whole contiguous tensor).

    Collective: every rank must walk it all. Rank 0 has the tensors, one bucket at a time, as parts of a flat buffer; other
    ranks get them on meta, and so does rank 0 from a failure on, so that the walk goes on at one pace. Beside the buffers
    rank 0 holds a message as large as the largest tensor at most, or the tensors of one layer that a conversion needs
    together, such as its stack of experts. A weight with an adapter is gathered in float32, and with what is added to it
    takes eight bytes per element.

    Args:
        state: of the model as it is now; None: looked up.
        layouts: the buckets; None: one for all.
        buffers: written in turn, so a tensor is good until the bucket after the next; None: new memory for each bucket.
        device: where the tensors are made; None: where the shards are.
        negated: every bit pattern differs from the weight's (-x, for integers ~x), zeros too.
        timeline: gets the seconds of each bucket's gathers.

    Raises:
        ManifestError: on every rank, before anything is gathered, when the model has other names than at set-up.
        Exception: on rank 0, whatever a conversion raised; all has been gathered then, so that no rank waits.
    """
    tensors = (ModelState(model) if state is None else state).tensors(plan)
    device = device or next(iter(tensors.values())).device
    maker = _BucketMaker(tensors, plan, device, negated=negated)
    for index, layout in enumerate([BucketLayout(plan.manifest.specs)] if layouts is None else layouts):
        views = layout.views(_memory(layout, buffers, device))
        with torch.no_grad(), timeline.on_device("gather", index) if timeline is not None else nullcontext():
            maker.fill(views)
        made = maker.failure is None
        yield from ((spec.name, views[spec.name] if made else _unmade(spec)) for spec in layout.specs)
    if maker.failure is not None:
        raise maker.failure


def _unmade(spec: TensorSpec) -> torch.Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


def _is_rank0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _memory(layout: BucketLayout, buffers: FlatBuffers | None, device: torch.device) -> torch.Tensor:
    if not _is_rank0():
        return torch.empty(layout.num_bytes, dtype=torch.uint8, device="meta")
    return torch.empty(layout.num_bytes, dtype=torch.uint8, device=device) if buffers is None else buffers.next()


class _BucketMaker:
    """Gathers what a bucket is made of, into its place or, for a conversion, beside it."""

    def __init__(
        self, state: Mapping[str, torch.Tensor], plan: ExportPlan, device: torch.device, *, negated: bool
    ) -> None:
        self.failure: Exception | None = None
        """What went wrong on rank 0; it gathers on without making anything."""
        self._is_rank0 = _is_rank0()
        self._state = state
        self._twin = plan.twin
        self._updates = plan.updates
        self._device = device
        self._negated = negated
        self._due = deque(plan.parts)
        self._message_bytes = plan.manifest.largest_bytes
        self._converted: dict[str, tuple[TensorSpec, torch.Tensor]] = {}
        """Of a group that goes on in the next bucket."""

    def fill(self, views: Mapping[str, torch.Tensor]) -> None:
        """Make the tensors of one bucket. Collective."""
        self._on_rank0(lambda: self._place(views))
        plain: list[Gather] = []
        converted: list[_Conversion] = []
        while self._due and self._due[0][1][0].name in views:
            group, specs = self._due.popleft()
            if is_plain(group, specs) and group.sources[0] not in self._updates:
                into = views[specs[0].name] if self._is_rank0 else None
                plain.append(Gather(self._state[group.sources[0]], specs[0].dtype, into))
                continue
            conversion = self._conversion(group, specs)
            if sum(other.num_bytes for other in converted) + conversion.num_bytes > self._message_bytes:
                self._convert(converted, views)
                converted = []
            converted.append(conversion)
        self._convert(converted, views)
        gather_to_rank0(plain, self._message_bytes, self._device)
        if self._negated:
            self._on_rank0(lambda: _negate(views.values()))

    def _conversion(self, group: TensorGroup, specs: Sequence[TensorSpec]) -> "_Conversion":
        dtype = max((spec.dtype for spec in specs), key=lambda dtype: dtype.itemsize)
        device = self._device if self._is_rank0 else torch.device("meta")
        updates = {source: self._updates[source] for source in group.sources if source in self._updates}
        exact = [name for source, update in updates.items() for name in (source, update.a, update.b)]
        dtypes = dict.fromkeys(group.sources, dtype) | dict.fromkeys(exact, torch.float32)
        whole = {name: torch.empty(self._state[name].shape, dtype=of, device=device) for name, of in dtypes.items()}
        return _Conversion(group, specs, dtype, updates, whole)

    def _convert(self, conversions: Sequence["_Conversion"], views: Mapping[str, torch.Tensor]) -> None:
        gathers = [
            Gather(self._state[source], into.dtype, into if self._is_rank0 else None)
            for conversion in conversions
            for source, into in conversion.whole.items()
        ]
        gather_to_rank0(gathers, self._message_bytes, self._device)
        for conversion in conversions:
            self._on_rank0(partial(self._run, conversion))
            self._on_rank0(lambda: self._place(views))

    def _run(self, conversion: "_Conversion") -> None:
        whole = conversion.whole
        merged = {name: update.merged(name, whole).to(conversion.dtype) for name, update in conversion.updates.items()}
        made = conversion.group.to_checkpoint(whole | merged, self._twin)
        self._converted |= {spec.name: (spec, made[spec.name]) for spec in conversion.specs}

    def _place(self, views: Mapping[str, torch.Tensor]) -> None:
        """Copy what has been converted to where this bucket has it."""
        for name in [name for name in self._converted if name in views]:
            spec, tensor = self._converted.pop(name)
            tensor = tensor.transpose(-1, -2) if spec.transposed else tensor
            if tuple(tensor.shape) != spec.shape:
                raise ManifestError(f"{name} was made as {list(tensor.shape)}; the manifest holds {spec.describe()}")
            views[name].copy_(tensor)

    def _on_rank0(self, action: Callable[[], None]) -> None:
        """The other ranks' next gather needs this rank, whatever happens here."""
        if self._is_rank0 and self.failure is None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 raised when all has been gathered
                self.failure = error


@dataclass(frozen=True)
class _Conversion:
    group: TensorGroup
    specs: Sequence[TensorSpec]
    dtype: torch.dtype
    updates: Mapping[str, LowRankUpdate]
    whole: dict[str, torch.Tensor]
    """The sources, on rank 0; on meta elsewhere. In `dtype`, but float32 where an adapter is merged, and its factors."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.whole.values())


def _negate(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.neg_() if tensor.is_floating_point() else tensor.bitwise_not_()
