"""Runs on the node of an engine: waits until the engine's actor and server have ended."""

import os
import time
from typing import Any

import psutil

from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.models.generation.sglang import server_supervisor

_POLL_INTERVAL_S = 0.1


def own_process_id(_: Any) -> int:
    """For an actor to call on itself."""
    return os.getpid()


def wait_for_end(actor_pid: int, timeout_s: float) -> list[int]:
    """Wait until an actor and its server are gone from this machine; the processes that are left."""
    deadline = Deadline(timeout_s)
    while (left := _family_of(actor_pid)) and deadline.remaining_s():
        time.sleep(_POLL_INTERVAL_S)
    return left


def _family_of(actor_pid: int) -> list[int]:
    """The actor, and the supervisor that it started, which is the last of the server to end."""
    name = server_supervisor.__name__
    family = [actor_pid] if psutil.pid_exists(actor_pid) else []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if name in command[:-1] and command[command.index(name) + 1] == str(actor_pid):
            family.append(process.pid)
    return family
