"""A receiver in a process of its own: one thread that does one thing after the other, as an engine's scheduler does."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gloo_engine import GlooEngine

from nemo_rl.distributed.weight_transfer.buckets import BucketHeader
from nemo_rl.distributed.weight_transfer.receiver import GroupSpec


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sockets_and_threads() -> set[str]:
    """Of this process: `socket:[inode]` and `thread id name`."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of this very listing
            found.add(os.readlink(link))
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            found.add(f"thread {task.name} {(task / 'comm').read_text().strip()}")
    return {name for name in found if name.startswith(("socket:", "thread "))}


class GlooProcess:
    """Implements `Receiver` over a child process. A call whose process has died fails, unless `silent_death`."""

    takes_flattened = True
    nccl_cumem_enable = None

    def __init__(self, name: str, *, on_bucket: Callable[[int], None] | None = None, silent_death: bool = False):
        self.name = name
        self.num_ranks = 1
        self._silent_death = silent_death
        self._stopped = threading.Event()
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self.process = context.Process(target=_serve, args=(child, name, on_bucket), daemon=True)
        self.process.start()
        child.close()
        self._pool = ThreadPoolExecutor(max_workers=1)
        self.call("ready")

    def join(self, group: GroupSpec, rank_offset: int, timeout_s: float) -> Future[None]:
        return self._pool.submit(self._call, "join", group, rank_offset, timeout_s)

    def announce(self, header: BucketHeader, group_name: str, timeout_s: float) -> Future[None]:
        return self._pool.submit(self._call, "announce", header, group_name, timeout_s)

    def leave(self, group_name: str, timeout_s: float) -> Future[None]:
        return self._pool.submit(self._call, "leave", group_name, timeout_s)

    def call(self, method: str, *arguments: Any) -> Any:
        """In the child, after what it was asked before; raises RuntimeError with its text."""
        return self._pool.submit(self._call, method, *arguments).result()

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            self._pipe.send((method, arguments))
            failed, answer = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            if self._silent_death:
                self._stopped.wait()
            raise RuntimeError("its process has ended") from error
        if failed:
            raise RuntimeError(answer)
        return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self._stopped.set()


def _serve(pipe: Connection, name: str, on_bucket: Callable[[int], None] | None) -> None:
    engine = GlooEngine(name, on_bucket=on_bucket)
    methods: dict[str, Callable[..., Any]] = {
        "ready": lambda: None,
        "join": lambda *arguments: engine.join(*arguments).result(),
        # As SGLang: it waits as long as torch's default lets it, whatever the caller's time.
        "announce": lambda header, group_name, timeout_s: engine.announce(header, group_name, 1800.0).result(),
        "leave": lambda *arguments: engine.leave(*arguments).result(),
        "first values": lambda: {name: tensor[0].item() for name, tensor in engine.received.items()},
        "sockets": lambda: {name for name in sockets_and_threads() if name.startswith("socket:")},
    }
    while True:
        method, arguments = pipe.recv()
        try:
            pipe.send((False, methods[method](*arguments)))
        except Exception as error:  # noqa: BLE001 it is the caller's to judge
            pipe.send((True, f"{type(error).__name__}: {error}"))
