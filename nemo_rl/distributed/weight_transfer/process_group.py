"""The weight-update group as trainer rank 0 sees it.

It is built from a store and a backend of its own and never enters torch.distributed's registry: a group made beside a
default group with a bound device would split the parent communicator, a call that the other ranks never make.
"""

import logging
import os
import socket
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, BackendConfig

from nemo_rl.distributed.weight_transfer.connections import end_connections, num_accepted, num_bytes_acknowledged
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.weight_transfer.receiver import GroupSpec
from nemo_rl.utils.network import resolve_host
from nemo_rl.utils.threads import on_thread

DeviceBackend = Any
"""torch's ProcessGroupGloo or ProcessGroupNCCL, whose stubs leave out their methods."""

logger = logging.getLogger(__name__)

_GLOO_DIRECT_RANKS = 3
_NCCL_BUFFER_BYTES, _NCCL_CHANNELS = 4 * 2**20, 64
"""NCCL's default per channel, and its greatest number of channels."""
_END_S = 2.0
"""For a thread to notice that its connections have ended: it takes milliseconds."""

_ARRIVE_S = 4.0
"""For what is under way to reach the engines that receive it."""
_STALL_S = 0.2
"""Without a byte acknowledged, nobody receives."""


class WeightUpdateGroup:
    """Rank 0 of the group. Nothing here waits without a deadline; what may wait does so on a thread of its own."""

    def __init__(self, *, name: str, backend: str, master_address: str, world_size: int, deadline: Deadline) -> None:
        """Open the group's store, on a free port of the system's choice."""
        timeout = timedelta(seconds=deadline.require("weight-update group"))
        self._store: TCPStore | None = open_store(master_address, timeout)
        self.spec = GroupSpec(name, backend, master_address, self._store.port, world_size)
        self._forming: Future[DeviceBackend] | None = None
        self._sending: Future[None] | None = None
        self._stream: torch.cuda.Stream | None = None
        self.has_sent = False
        """Whether a broadcast was ever started: NCCL makes its communicator then, and cannot be called back from it."""

    def form(self, deadline: Deadline) -> Future[DeviceBackend]:
        """Start joining as rank 0; done when all ranks have."""
        # Beyond the deadline: it ends with `close`, and the caller can say more about why.
        spec, left_s = self.spec, deadline.require("weight-update group") + _END_S
        self._forming = on_thread(f"form-{spec.name}", lambda: _make_backend(spec, left_s))
        return self._forming

    @property
    def num_arrived(self) -> int:
        """Ranks that have reached the store; 0 after `close`."""
        # The server is a client of itself, and so is rank 0.
        return max(0, num_accepted(self.spec.master_port) - 2) if self._store is not None else 0

    def send(
        self, tensors: Sequence[torch.Tensor], timeout_s: float, ready: torch.cuda.Event | None = None
    ) -> Future[None]:
        """Start broadcasting contiguous tensors, one after the other; done when every rank has them.

        Args:
            ready: recorded where the tensors were complete; the broadcast waits for nothing else on that stream.
        """
        if self._forming is None:
            raise TransferError(f"weight-update group {self.spec.name} has ended")
        self.has_sent = True
        backend = self._forming.result()
        if ready is not None and self._stream is None:
            self._stream = torch.cuda.Stream(tensors[0].device)
        stream, timeout = self._stream, timedelta(seconds=timeout_s)
        # Calls into gloo and NCCL block in C++; from another thread an engine's refusal can still be seen.
        self._sending = on_thread(
            f"send-{self.spec.name}", lambda: _broadcast_all(backend, tensors, stream, ready, timeout)
        )
        return self._sending

    def shows_arrival(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the end of rank 0's broadcast of `tensors` means that every other rank has begun to receive.

        gloo's root sends to ranks 1 and 2 itself, and only when they ask. NCCL's is done when the rest fits into the buffers
        of the ranks behind it.
        """
        if self.spec.backend == "gloo":
            return self.spec.world_size <= _GLOO_DIRECT_RANKS
        buffer_bytes = int(os.environ.get("NCCL_BUFFSIZE", _NCCL_BUFFER_BYTES)) * _NCCL_CHANNELS
        return sum(tensor.nbytes for tensor in tensors) > buffer_bytes * (self.spec.world_size - 1)

    def close(self) -> None:
        """End the connections on this side, whatever is under way, and free all that the group holds. Idempotent.

        What waits for them then fails at once on the other side too: an engine in a broadcast, or one still joining.
        NCCL is less good at it. Over NVLink an engine in a broadcast does not notice, and has to be replaced; and where
        an engine ended before its first broadcast, a thread of this process stays in NCCL, in nobody's way.
        """
        store, forming, sending = self._store, self._forming, self._sending
        self._store, self._forming, self._sending = None, None, None
        if store is None:
            return
        published = [store.get(key) for key in store.list_keys()] if self.spec.backend == "gloo" else []
        del store  # ends the server, and with it every wait of a rendezvous
        if published and sending is not None:
            _let_arrive(published, sending)
        end_connections(published)
        if forming is None or not _has_ended(forming) or forming.exception() is not None:
            return
        backend = forming.result()
        if self.spec.backend == "nccl":
            backend.abort()
        if sending is not None and not _has_ended(sending):
            return
        if self.spec.backend == "gloo":
            backend.abort()


def event_now(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """For `WeightUpdateGroup.send`: what the current stream has done by now; None for a tensor on the CPU."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def default_backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def open_store(address: str, timeout: timedelta, *, port: int = 0, world_size: int | None = None) -> TCPStore:
    """A store that listens at this address alone; left to itself it would at every address of the machine.

    Then any connection from the same port of another address would be in its way, too.

    Args:
        port: 0: a free one.
        world_size: wait for so many ranks; None: for none.
    """
    host = resolve_host(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        number = listener.getsockname()[1]
        return TCPStore(
            host_name=host,
            port=number,
            world_size=world_size,
            is_master=True,
            wait_for_workers=world_size is not None,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )


def _has_ended(future: Future[Any]) -> bool:
    """Whether a thread whose connections were ended has noticed. One that has not ends with its own time limit."""
    done, _ = wait([future], timeout=_END_S)
    if not done:
        logger.error("a thread of the weight-update group still waits %.0f s after its connections were ended", _END_S)
    return bool(done)


def _let_arrive(published: Sequence[bytes], sending: Future[None]) -> None:
    """Wait as long as bytes flow, to engines that did not fail (see `connections`)."""
    limit, before = Deadline(_ARRIVE_S), -1
    while not sending.done() and limit.remaining_s():
        acknowledged = num_bytes_acknowledged(published)
        if acknowledged == before:
            return
        before = acknowledged
        wait([sending], timeout=_STALL_S)


def _broadcast_all(
    backend: DeviceBackend,
    tensors: Sequence[torch.Tensor],
    stream: torch.cuda.Stream | None,
    ready: torch.cuda.Event | None,
    timeout: timedelta,
) -> None:
    options = BroadcastOptions()
    options.rootRank = 0
    options.timeout = timeout
    # The current stream is a thread's own.
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        if stream is not None and ready is not None:
            stream.wait_event(ready)
        works = [backend.broadcast([tensor], options) for tensor in tensors]
        for work in works:
            work.wait(timeout)


def _make_backend(spec: GroupSpec, timeout_s: float) -> DeviceBackend:
    """Under the store keys that the engine's torch uses: group name twice, then the backend's first device type."""
    timeout = timedelta(seconds=timeout_s)
    # A client of its own: the server can then end while this one waits.
    store = TCPStore(spec.master_address, spec.master_port, is_master=False, timeout=timeout)
    device = next(iter(BackendConfig(Backend(spec.backend)).get_device_backend_map()))
    own_store = PrefixStore(f"{device}/", PrefixStore(f"{spec.name}/", PrefixStore(spec.name, store)))
    if spec.backend == "gloo":
        return dist.ProcessGroupGloo(own_store, 0, spec.world_size, timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    # torch ends the whole process when an operation takes longer, so it must outlast every deadline.
    options._timeout = 2 * timeout + timedelta(minutes=10)
    return dist.ProcessGroupNCCL(own_store, 0, spec.world_size, options)
