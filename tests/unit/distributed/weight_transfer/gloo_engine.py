"""A receiver without a server: real gloo, its ranks on threads of this process."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

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

    def __init__(
        self,
        name: str,
        num_ranks: int = 1,
        *,
        on_join: Callable[[], None] | None = None,
        on_bucket: Callable[[int], None] | None = None,
    ):
        self.name = name
        self.num_ranks = num_ranks
        self.received: dict[str, torch.Tensor] = {}
        self.headers: list[BucketHeader] = []
        self.rank_offset = -1
        self.group: GroupSpec | None = None
        self._on_join, self._on_bucket = on_join, on_bucket
        self._backends: list[dist.ProcessGroupGloo] = []
        self._pool = ThreadPoolExecutor(max_workers=2 * num_ranks + 1)

    def join(self, group: GroupSpec, rank_offset: int, timeout_s: float) -> Future[None]:
        return self._pool.submit(self._join, group, rank_offset, timeout_s)

    def _join(self, group: GroupSpec, rank_offset: int, timeout_s: float) -> None:
        if self._on_join is not None:
            self._on_join()
        self.group, self.rank_offset = group, rank_offset
        ranks = [self._pool.submit(_connect, group, rank_offset + i, timeout_s) for i in range(self.num_ranks)]
        self._backends = [rank.result() for rank in ranks]

    def announce(self, header: BucketHeader, group_name: str, timeout_s: float) -> Future[None]:
        return self._pool.submit(self._receive, header, timeout_s)

    def _receive(self, header: BucketHeader, timeout_s: float) -> None:
        if self._on_bucket is not None:
            self._on_bucket(header.index)
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
            assert all(torch.equal(copy, copies[0]) for copy in copies)
            payload += copies[0].numpy().tobytes()
        offset = 0
        for name, dtype, shape, size in zip(header.names, dtypes, header.shapes, sizes, strict=True):
            raw = bytearray(payload[offset : offset + size])
            self.received[name] = torch.frombuffer(raw, dtype=dtype).reshape(shape)
            offset += size

    def leave(self, group_name: str, timeout_s: float) -> Future[None]:
        for backend in self._backends:
            backend.abort()
        self._backends = []
        done: Future[None] = Future()
        done.set_result(None)
        return done


class PerTensorEngine(GlooEngine):
    takes_flattened = False


def _connect(group: GroupSpec, rank: int, timeout_s: float) -> dist.ProcessGroupGloo:
    timeout = timedelta(seconds=timeout_s)
    store = TCPStore(group.master_address, group.master_port, is_master=False, timeout=timeout)
    own_store = PrefixStore("cpu/", PrefixStore(f"{group.name}/", PrefixStore(group.name, store)))
    return dist.ProcessGroupGloo(own_store, rank, group.world_size, timeout=timeout)
