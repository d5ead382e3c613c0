"""A receiver without a server: real gloo, its ranks on threads of this process."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore

from nemo_rl.distributed.weight_transfer.buckets import BucketHeader
from nemo_rl.distributed.weight_transfer.manifest import Manifest, TensorSpec
from nemo_rl.distributed.weight_transfer.receiver import GroupSpec


def manifest_of(named: Sequence[tuple[str, torch.Tensor]]) -> Manifest:
    """Of tensors that are made of themselves."""
    return Manifest(tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype, (name,)) for name, tensor in named))


class GlooEngine:
    """Implements `Receiver`; keeps what it received, and fails where it is told to."""

    takes_flattened = True
    nccl_cumem_enable: str | None = None

    def __init__(
        self,
        name: str,
        num_ranks: int = 1,
        *,
        on_join: Callable[[], None] | None = None,
        on_bucket: Callable[[int], None] | None = None,
        after_bucket: Callable[[int], None] | None = None,
        lies_at: int | None = None,
    ):
        """`on_bucket`, `after_bucket`: called with the bucket's index before and after it is received.
        `lies_at`: the bucket that is answered and not received.
        """
        self.name = name
        self.num_ranks = num_ranks
        self.received: dict[str, torch.Tensor] = {}
        self.headers: list[BucketHeader] = []
        self.rank_offset = -1
        self.group: GroupSpec | None = None
        self._on_join, self._on_bucket, self._after_bucket = on_join, on_bucket, after_bucket
        self._lies_at = lies_at
        self._backends: list[dist.ProcessGroupGloo] = []
        self._pool = ThreadPoolExecutor(max_workers=2 * num_ranks + 4)
        self._scheduler = Lock()
        self.calls: list[Future[None]] = []
        """Joins, announcements and leaves, in order."""

    def _schedule(self, action: Callable[..., None], *arguments: Any) -> Future[None]:
        """One after the other, as an engine's scheduler does."""

        def run() -> None:
            with self._scheduler:
                try:
                    action(*arguments)
                except RuntimeError as error:
                    raise error.with_traceback(None)  # noqa: B904 its frames hold the group

        call = self._pool.submit(run)
        self.calls.append(call)
        return call

    def mend(self) -> None:
        """No more faults."""
        self._on_bucket = self._after_bucket = self._lies_at = None

    def join(self, group: GroupSpec, rank_offset: int, timeout_s: float) -> Future[None]:
        return self._schedule(self._join, group, rank_offset, timeout_s)

    def _join(self, group: GroupSpec, rank_offset: int, timeout_s: float) -> None:
        if self._on_join is not None:
            self._on_join()
        self.group, self.rank_offset = group, rank_offset
        ranks = [self._pool.submit(_connect, group, rank_offset + i, timeout_s) for i in range(self.num_ranks)]
        self._backends = [rank.result() for rank in ranks]

    def announce(self, header: BucketHeader, group_name: str, timeout_s: float) -> Future[None]:
        return self._schedule(self._receive, header, timeout_s)

    def _receive(self, header: BucketHeader, timeout_s: float) -> None:
        if self._on_bucket is not None:
            self._on_bucket(header.index)
        if header.index == self._lies_at:
            return
        self.headers.append(header)
        dtypes = [getattr(torch, dtype) for dtype in header.dtypes]
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(header.shapes, dtypes, strict=True)]
        flats = [sum(sizes)] if header.flattened else sizes
        payload = b""
        for size in flats:
            copies = [torch.empty(size, dtype=torch.uint8) for _ in self._backends]
            options = BroadcastOptions()
            options.rootRank = 0
            works = [backend.broadcast([copy], options) for backend, copy in zip(self._backends, copies, strict=True)]
            for work in works:
                work.wait(timedelta(seconds=timeout_s))
            del work, works
            assert all(torch.equal(copy, copies[0]) for copy in copies)
            payload += copies[0].numpy().tobytes()
        if self._after_bucket is not None:
            self._after_bucket(header.index)
        offset = 0
        for name, dtype, shape, size in zip(header.names, dtypes, header.shapes, sizes, strict=True):
            raw = bytearray(payload[offset : offset + size])
            self.received[name] = torch.frombuffer(raw, dtype=dtype).reshape(shape)
            offset += size

    def leave(self, group_name: str, timeout_s: float) -> Future[None]:
        return self._schedule(self._leave, group_name)

    def _leave(self, group_name: str) -> None:
        if self.group is None or self.group.name != group_name or not self._backends:
            raise RuntimeError(f"the group {group_name} does not exist")
        self.drop_connections()

    def drop_connections(self) -> None:
        """Its ends of them, which end with the backends; nothing may be under way."""
        self._backends.clear()


class PerTensorEngine(GlooEngine):
    takes_flattened = False


def _connect(group: GroupSpec, rank: int, timeout_s: float) -> dist.ProcessGroupGloo:
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(group.master_address, group.master_port, is_master=False, timeout=timeout)
    own_store = PrefixStore("cpu/", PrefixStore(f"{group.name}/", PrefixStore(group.name, store)))
    return dist.ProcessGroupGloo(own_store, rank, group.world_size, timeout=timeout)
