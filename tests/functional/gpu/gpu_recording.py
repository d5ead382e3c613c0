"""A trainer rank that records what a refit puts on its GPU, and overwrites what it sends as soon as it may, or sooner."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import measuring
import ray
import torch
import torch.distributed as dist
from gpu_stack import ReloadingWorker
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from nemo_rl.distributed.weight_transfer import process_group
from nemo_rl.distributed.weight_transfer.buckets import BucketLayout, FlatBuffers, NamedTensor
from nemo_rl.distributed.weight_transfer.sender import BucketSender, PreparedBucket, RefitStats
from nemo_rl.models.policy import gather

# Ray's workers do not have these folders on their path.
for module in (measuring, sys.modules[__name__]):
    ray.cloudpickle.register_pickle_by_value(module)

TRAINERS = "trainers"
LONG_CYCLES = 20_000_000
"""Of a GPU's clock: about 10 ms."""
NAN_BYTE = 0xFF
"""Every float of such bytes is NaN."""


@dataclass(frozen=True)
class Watch:
    """What is done to the refits from now on."""

    records: bool = True
    """With a long kernel before each message of a gather."""
    overwrites: str = "never"
    """`after`: NaN into a bucket's source once it has been sent; `before`: zeros, too early."""
    waits: bool = True
    """False: the broadcast does not wait for its gathers."""
    fresh: bool = False
    """Each bucket has memory of its own, dropped when it has been sent; otherwise two buffers are used in turn."""


@dataclass(frozen=True)
class Collective:
    group: str
    op: str
    num_bytes: int
    stream: int
    """The handle of the current one, for which the collective waits."""


@dataclass
class Recording:
    """Of one refit on one rank."""

    messages: list[list[tuple[tuple[int, ...], str]]] = field(default_factory=list)
    """Shapes and dtypes of the tensors that were gathered together."""
    num_buckets: int = 0
    collectives: list[Collective] = field(default_factory=list)
    margins_ms: list[float] = field(default_factory=list)
    """Of each bucket on rank 0: from the end of its gathers to the start of its broadcast, by the GPU's clock."""


class RecordingWorker(ReloadingWorker, measuring.MeasuringWorker):
    watched = Watch(records=False)

    def watch(self, watched: Watch) -> None:
        self.watched = watched

    def recording(self) -> Recording:
        """Of the last refit that was recorded."""
        return self._recording

    def prepare_weight_update(self, **arguments: Any) -> None:
        """A refit that is recorded begins when it is."""
        if not self.watched.records:
            super().prepare_weight_update(**arguments)

    def update_weights_to_sglang_distributed(self, **arguments: Any) -> RefitStats:
        if not self.watched.records:
            return super().update_weights_to_sglang_distributed(**arguments)
        with recorded(self.watched) as self._recording:
            return super().update_weights_to_sglang_distributed(**arguments)

    def _refit_buffers(self, layouts: Sequence[BucketLayout]) -> FlatBuffers:
        buffers = super()._refit_buffers(layouts)
        return FreshMemory(layouts, self.device) if self.watched.fresh else buffers


class FreshMemory(FlatBuffers):
    def next(self) -> torch.Tensor:
        return torch.empty_like(super().next())


class CollectiveRecorder(TorchDispatchMode):
    """Sees whatever this thread asks torch.distributed for, through whichever function; `recorded` adds point to point."""

    def __init__(self, collectives: list[Collective]) -> None:
        super().__init__()
        self._collectives = collectives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with the shards
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collectives.append(collective(TRAINERS, func._schema.name, args))
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded(watched: Watch) -> Iterator[Recording]:
    """Everything in the block, on any thread."""
    recording = Recording()
    gathered: list[torch.cuda.Event] = []
    started: list[torch.cuda.Event] = []
    gather_message, broadcast_all = gather._gather_message, process_group._broadcast_all
    prepare, send, batch = BucketSender.prepare, BucketSender.send, dist.batch_isend_irecv

    def slow_gather(gathers: list[gather.Gather], device: torch.device) -> None:
        recording.messages.append([(tuple(one.value.shape), str(one.dtype)) for one in gathers])
        torch.cuda._sleep(LONG_CYCLES)
        gather_message(gathers, device)

    def seen_batch(operations: list[dist.P2POp]) -> list[dist.Work]:
        recording.collectives += [collective(TRAINERS, one.op.__name__, one.tensor) for one in operations]
        with _disable_current_modes():  # NCCL has no work for each of them, and a mode may not return none
            return batch(operations)

    def timed_prepare(sender: BucketSender, bucket: list[NamedTensor]) -> PreparedBucket:
        gathered.append(event_of_now())
        recording.num_buckets += 1
        return prepare(sender, bucket)

    def timed_broadcast(backend: Any, tensors: Any, stream: Any, ready: Any, timeout: Any) -> None:
        timed = TimedBackend(backend, recording.collectives, started)
        broadcast_all(timed, tensors, stream, ready if watched.waits else None, timeout)
        if watched.overwrites == "after":
            overwrite(tensors, NAN_BYTE)
            tensors.clear()

    def overwriting_send(sender: BucketSender, bucket: PreparedBucket) -> None:
        if watched.overwrites == "before":
            bucket.ready.synchronize()
            overwrite(bucket.payload, 0)
        send(sender, bucket)

    with ExitStack() as stack:
        for place, name, function in (
            (gather, "_gather_message", slow_gather),
            (dist, "batch_isend_irecv", seen_batch),
            (process_group, "_broadcast_all", timed_broadcast),
            (BucketSender, "prepare", timed_prepare),
            (BucketSender, "send", overwriting_send),
        ):
            stack.enter_context(patch.object(place, name, function))
        stack.enter_context(CollectiveRecorder(recording.collectives))
        yield recording
    torch.cuda.synchronize()
    recording.margins_ms = [end.elapsed_time(start) for end, start in zip(gathered, started, strict=True)]


class TimedBackend:
    """That of the weight-update group; notes when its stream comes to a broadcast."""

    def __init__(self, backend: Any, collectives: list[Collective], started: list[torch.cuda.Event]) -> None:
        self._backend, self._collectives, self._started = backend, collectives, started

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self._collectives.append(collective("weight update", "broadcast", tensors))
        self._started.append(event_of_now())
        return self._backend.broadcast(tensors, options)


def collective(group: str, op: str, arguments: Any) -> Collective:
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    return Collective(group, op, sum(tensor.nbytes for tensor in tensors), torch.cuda.current_stream().cuda_stream)


def event_of_now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def overwrite(payload: list[torch.Tensor], byte: int) -> None:
    """At once: on a stream that waits for nothing."""
    stream = torch.cuda.Stream(payload[0].device)
    with torch.cuda.stream(stream):
        for tensor in payload:
            tensor.view(torch.uint8).fill_(byte)
    stream.synchronize()
