"""The weight-update group as trainer rank 0 sees it.

It is built from a store and a backend of its own and never enters torch.distributed's registry: a group made beside a
default group with a bound device would split the parent communicator, a call that the other ranks never make.
"""

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Backend, BackendConfig

from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.weight_transfer.receiver import GroupSpec, Receiver

DeviceBackend = Any
"""torch's ProcessGroupGloo or ProcessGroupNCCL, whose stubs leave out their methods."""


class WeightUpdateGroup:
    """Rank 0 of the group. Nothing here waits without a deadline."""

    def __init__(self, spec: GroupSpec, store: TCPStore, backend: DeviceBackend):
        self.spec = spec
        self._store = store
        self._backend: DeviceBackend | None = backend

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Start sending a contiguous tensor; the caller keeps it alive until the work is done."""
        options = BroadcastOptions()
        options.rootRank = 0
        if self._backend is None:
            raise TransferError(f"weight-update group {self.spec.name} is gone")
        work: dist.Work = self._backend.broadcast([tensor], options)
        return work

    def close(self) -> None:
        """Drop the connections of a group with nothing under way. Idempotent."""
        if self._backend is not None:
            self._backend.abort()
            self._backend = None

    def abandon(self) -> None:
        """Let go of a group whose broadcast may never be received, without waiting for it. Idempotent.

        gloo's abort and its destructor wait, with the GIL held, until that broadcast times out; so the backend stays
        alive as long as this process.
        """
        _ABANDONED.append(self._backend)
        self._backend = None


_ABANDONED: list[DeviceBackend] = []


def default_backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def connect_rollout_engines_from_distributed(
    *,
    rollout_engines: Sequence[Receiver],
    engine_gpu_counts: Sequence[int],
    group_name: str,
    backend: str,
    master_address: str,
    deadline: Deadline,
) -> WeightUpdateGroup:
    """Form the group: all engines are asked at once, since none can join before the others.

    Raises:
        TransferError: an engine refused.
        TimeoutError: the group did not form within the deadline.
    """
    # The store lives as long as the group and listens on a free port of the system's choice.
    store = TCPStore(
        host_name=master_address,
        port=0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=deadline.require("weight-update group")),
    )
    spec = GroupSpec(
        name=group_name,
        backend=backend,
        master_address=master_address,
        master_port=store.port,
        world_size=1 + sum(engine_gpu_counts),
    )
    offsets = [1 + sum(engine_gpu_counts[:i]) for i in range(len(engine_gpu_counts))]
    joins = {
        engine.join(spec, offset, deadline.remaining_s()): engine
        for engine, offset in zip(rollout_engines, offsets, strict=True)
    }
    own = _in_thread(spec, store, deadline)
    waits: list[Future[Any]] = [own, *joins]
    done, pending = wait(waits, timeout=deadline.remaining_s(), return_when=FIRST_EXCEPTION)
    for future, engine in joins.items():
        if future in done and (error := future.exception()) is not None:
            raise TransferError(f"{engine.name} did not join the weight-update group: {error}") from error
    if pending:
        names = [engine.name for future, engine in joins.items() if future in pending]
        raise TimeoutError(f"weight-update group: not formed within {deadline.timeout_s:g} s; waiting for {names}")
    return WeightUpdateGroup(spec, store, own.result())


def disconnect_rollout_engines_from_distributed(
    *, rollout_engines: Sequence[Receiver], group: WeightUpdateGroup, deadline: Deadline
) -> None:
    """Take the group down on both sides.

    Raises:
        TransferError: an engine did not let go of it.
    """
    leaves = {engine.leave(group.spec.name, deadline.remaining_s()): engine for engine in rollout_engines}
    group.close()
    done, pending = wait(leaves, timeout=deadline.remaining_s())
    failed = {leaves[future].name: future.exception() for future in done if future.exception() is not None}
    failed |= {leaves[future].name: TimeoutError("no answer") for future in pending}
    if failed:
        raise TransferError(f"weight-update group {group.spec.name} is still held: {failed}")


def _in_thread(spec: GroupSpec, store: TCPStore, deadline: Deadline) -> Future[DeviceBackend]:
    """Rendezvous blocks in C++; on its own thread an engine's refusal can still be seen."""
    future: Future[DeviceBackend] = Future()

    def run() -> None:
        try:
            future.set_result(_make_backend(spec, store, deadline))
        except Exception as error:  # noqa: BLE001 a future that is never set would be waited for until the deadline
            future.set_exception(error)

    Thread(target=run, name=f"rendezvous-{spec.name}", daemon=True).start()
    return future


def _make_backend(spec: GroupSpec, store: TCPStore, deadline: Deadline) -> DeviceBackend:
    """Under the store keys that the engine's torch uses: group name twice, then the backend's first device type."""
    device = next(iter(BackendConfig(Backend(spec.backend)).get_device_backend_map()))
    own_store = PrefixStore(f"{device}/", PrefixStore(f"{spec.name}/", PrefixStore(spec.name, store)))
    timeout = timedelta(seconds=deadline.require("weight-update group"))
    if spec.backend == "gloo":
        return dist.ProcessGroupGloo(own_store, 0, spec.world_size, timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(own_store, 0, spec.world_size, options)
