"""A trainer rank that can refit in more ways than one, for comparison."""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nemo_rl.distributed.weight_transfer.buckets import (
    NUM_BUFFERS,
    BucketHeader,
    FlatBuffers,
    NamedTensor,
    bucket_layouts,
    flatten_bucket,
    iter_named_tensor_buckets,
    make_header,
)
from nemo_rl.distributed.weight_transfer.manifest import TensorSpec
from nemo_rl.distributed.weight_transfer.process_group import WeightUpdateGroup, event_now
from nemo_rl.distributed.weight_transfer.receiver import Receiver
from nemo_rl.distributed.weight_transfer.sender import RefitStats
from nemo_rl.distributed.weight_transfer.timeline import Timeline
from nemo_rl.models.policy.conversions import TensorGroup
from nemo_rl.models.policy.export import dtensor_params_generator
from nemo_rl.models.policy.export_plan import ExportPlan, is_plain
from nemo_rl.models.policy.model_state import clean_name
from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2

NUM_RAW = 8
"""Broadcasts that the raw figure is made of; the first starts the clock, so that no announcement counts."""
TIMEOUT_S = 600.0


class MeasuringWorker(DTensorPolicyWorkerV2):
    """`path`: "this", as the product has it; "serial": the same without any overlap; "usual": one gather to all ranks and
    one broadcast per tensor, one announcement per bucket, nothing beside anything else.
    """

    path = "this"
    bucket_bytes: int | None = None

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._kept: dict[int, FlatBuffers] = {}
        self._start_bytes = 0

    def choose(self, path: str, bucket_bytes: int | None) -> None:
        """Of the refits from now on; bucket_bytes None: as the caller of the refit says."""
        if self._buffers is not None and self.bucket_bytes is not None:
            self._kept[self.bucket_bytes] = self._buffers
        self.path, self.bucket_bytes = path, bucket_bytes
        # A run has one size and uses its memory again.
        self._buffers = None if bucket_bytes is None else self._kept.get(bucket_bytes)

    def prepare_weight_update(self, *, buffer_size_bytes: int, **others: Any) -> None:
        if self.path == "this":
            super().prepare_weight_update(buffer_size_bytes=self.bucket_bytes or buffer_size_bytes, **others)

    def update_weights_to_sglang_distributed(
        self, *, rollout_engines: Sequence[Receiver], buffer_size_bytes: int, **others: Any
    ) -> RefitStats:
        size_bytes = self.bucket_bytes or buffer_size_bytes
        if self.path == "this":
            return super().update_weights_to_sglang_distributed(
                rollout_engines=rollout_engines, buffer_size_bytes=size_bytes, **others
            )
        timeline = Timeline(self.device)
        if self.path == "serial":
            buckets = self._gathered(size_bytes, timeline)
        else:
            tensors = self._full_tensors()
            buckets = _timed(
                iter_named_tensor_buckets(tensors, size_bytes, self.refit_plan().manifest), timeline, self.device
            )
        stats = RefitStats()
        for index, bucket in enumerate(buckets):
            if self._update_group is not None:
                header = make_header(index, bucket, flattened=self.path == "serial")
                payload = [flatten_bucket(bucket)] if self.path == "serial" else [tensor for _, tensor in bucket]
                _send(rollout_engines, self._update_group, header, payload, timeline)
            stats = replace(
                stats,
                num_bytes=stats.num_bytes + sum(tensor.nbytes for _, tensor in bucket),
                num_tensors=stats.num_tensors + len(bucket),
                num_buckets=index + 1,
            )
        return replace(stats, spans=timeline.spans())

    def gather_s(self, bucket_bytes: int) -> float:
        """Seconds of the gathers alone, as a refit makes them."""
        dist.barrier()
        start_s = time.perf_counter()
        for _ in self._gathered(bucket_bytes, Timeline(self.device)):
            pass
        self._wait_for_device()
        return time.perf_counter() - start_s

    def raw_s(self, rollout_engines: Sequence[Receiver], num_bytes: int) -> float:
        """Seconds of a broadcast of `num_bytes` to every engine, over the weight-update group; 0 on ranks but 0.

        It goes under names that no model has: engines receive and drop it.
        """
        if self._update_group is None:
            return 0.0
        num_values = num_bytes // 2 // NUM_RAW
        bucket = [
            (f"nobody.has.{index}", torch.zeros(num_values, dtype=torch.bfloat16, device=self.device))
            for index in range(NUM_RAW)
        ]
        header = make_header(0, bucket, flattened=False)
        answers = [engine.announce(header, self._update_group.spec.name, TIMEOUT_S) for engine in rollout_engines]
        start_s = 0.0
        for index, (_, tensor) in enumerate(bucket):
            self._update_group.send([tensor], TIMEOUT_S, event_now(tensor)).result()
            start_s = time.perf_counter() if index == 0 else start_s
        seconds = time.perf_counter() - start_s
        for answer in answers:
            answer.result()
        return seconds * NUM_RAW / (NUM_RAW - 1)

    def move_weights(self) -> None:
        """What a training step does to weights, without its memory: each that is trained differs afterwards."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.02).add_(0.001)

    def start_peak(self) -> None:
        """From here on memory of the GPU is counted. Buffers of earlier refits are freed, so that the next one's count."""
        self._buffers = None
        self._kept.clear()
        gc.collect()
        self._wait_for_device()
        torch.cuda.reset_peak_memory_stats(self.device)
        self._start_bytes = torch.cuda.memory_allocated(self.device)

    def extra_bytes(self, bucket_bytes: int) -> tuple[int, int]:
        """The most of the GPU's memory since `start_peak` beyond what was taken then; and `bound_bytes`."""
        self._wait_for_device()
        extra = torch.cuda.max_memory_allocated(self.device) - self._start_bytes
        return extra, bound_bytes(self.refit_plan(), bucket_bytes, dist.get_rank())

    def _gathered(self, bucket_bytes: int, timeline: Timeline) -> Iterator[list[NamedTensor]]:
        plan = self.refit_plan()
        layouts = bucket_layouts(plan.manifest, bucket_bytes)
        if dist.get_rank() == 0 and (self._buffers is None or not self._buffers.fit(layouts)):
            self._buffers = FlatBuffers(layouts, self.device)
        tensors = dtensor_params_generator(
            self.model,
            plan,
            state=self._state,
            layouts=layouts,
            buffers=self._buffers,
            device=self.device,
            timeline=timeline,
        )
        for bucket in iter_named_tensor_buckets(tensors, bucket_bytes, plan.manifest):
            self._wait_for_device()
            yield bucket

    def _full_tensors(self) -> Iterator[NamedTensor]:
        """Every tensor on every rank, one gather each; with LoRA three, since adapters are merged in float32."""
        plan = self.refit_plan()
        state = {clean_name(name): value for name, value in self.model.state_dict().items()}
        for group, specs in plan.parts:
            dtype = max((spec.dtype for spec in specs), key=lambda dtype: dtype.itemsize)
            with torch.no_grad():
                whole = {name: self._whole(state, name, dtype) for name in group.sources}
                made = group.to_checkpoint(whole, plan.twin)
            for spec in specs:
                tensor = made[spec.name].transpose(-1, -2) if spec.transposed else made[spec.name]
                yield spec.name, tensor.to(spec.dtype).contiguous()

    def _whole(self, state: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype) -> torch.Tensor:
        update = self.export_plan.updates.get(name)
        if update is None:
            return _full_tensor(state[name].to(dtype))
        # A copy: on one rank nothing is gathered, and the merge is in place.
        parts = {part: _full_tensor(state[part].float()).clone() for part in (name, update.a, update.b)}
        return update.merged(name, parts).to(dtype)

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def bound_bytes(plan: ExportPlan, bucket_bytes: int, rank: int) -> int:
    """What a refit may take beyond the shards: two buckets and the largest tensor on rank 0, one bucket on others.

    A bucket counts as large as the largest that is made: a tensor larger than `bucket_bytes` has one of its own. Where
    tensors are converted, as a layer's experts are, rank 0 also holds what they are made of, as many as the largest tensor
    has room for or one group, and what is made of one. With an adapter that is made in float32: the weight and what is added.
    """
    layouts = bucket_layouts(plan.manifest, bucket_bytes)
    bucket = max(layout.num_bytes for layout in layouts)
    if rank != 0:
        return bucket
    largest = plan.manifest.largest_bytes
    converted = max((_converted_bytes(plan, group, specs) for group, specs in plan.parts), default=0)
    beside = max(largest, converted) + converted if converted else 0
    return min(NUM_BUFFERS, len(layouts)) * bucket + largest + beside


def _converted_bytes(plan: ExportPlan, group: TensorGroup, specs: Sequence[TensorSpec]) -> int:
    """Of what a group is made of; 0: it is gathered where it belongs."""
    if any(source in plan.updates for source in group.sources):
        return sum(spec.num_values for spec in specs) * 2 * torch.float32.itemsize
    return 0 if is_plain(group, specs) else sum(spec.num_bytes for spec in specs)


def _full_tensor(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _timed(
    buckets: Iterator[list[NamedTensor]], timeline: Timeline, device: torch.device
) -> Iterator[list[NamedTensor]]:
    index, start_s = 0, timeline.now_s()
    for bucket in buckets:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        timeline.add("gather", index, start_s, timeline.now_s())
        yield bucket
        index, start_s = index + 1, timeline.now_s()


def _send(
    engines: Sequence[Receiver],
    group: WeightUpdateGroup,
    header: BucketHeader,
    payload: list[torch.Tensor],
    timeline: Timeline,
) -> None:
    """Announce, broadcast, wait until it is loaded."""
    start_s = timeline.now_s()
    answers = [engine.announce(header, group.spec.name, TIMEOUT_S) for engine in engines]
    group.send(payload, TIMEOUT_S, event_now(payload[0])).result()
    sent_s = timeline.now_s()
    for answer in answers:
        answer.result()
    timeline.add("broadcast", header.index, start_s, sent_s)
    timeline.add("load", header.index, sent_s, timeline.now_s())
