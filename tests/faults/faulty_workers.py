"""Engines and trainer ranks that are the real ones, until they are told to fail."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from fault_proxy import EngineFault, FaultProxy

from nemo_rl.distributed.weight_transfer.sender import RefitStats
from nemo_rl.models.generation.sglang import sglang_worker
from nemo_rl.models.generation.sglang.server_args import build_command
from nemo_rl.models.generation.sglang.server_process import ServerProcess
from nemo_rl.models.generation.sglang.sglang_worker import SGLangGenerationWorker
from nemo_rl.models.policy.workers import dtensor_policy_worker_v2
from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2

FORKING_SERVER = str(Path(__file__).with_name("forking_server.py"))


class FaultyEngine(SGLangGenerationWorker):
    """A real server behind a `FaultProxy`; everybody is told the proxy's address.

    Process faults, by name: `kill server` SIGKILL of everything of the server, `kill scheduler`, `stop server` SIGSTOP of
    everything, `stop scheduler`, `kill actor` SIGKILL of this process; `stop scheduler, then kill` has the bytes of a
    bucket in the kernel of a process that never reads them.
    """

    def start(self) -> str:
        self._own_url = super().start()
        self._proxy = FaultProxy(self._own_url, self.act)
        return self._proxy.url

    def _launch(self, port: int, internal_port: int) -> ServerProcess:
        def forking(*arguments: Any) -> list[str]:
            python, _, _, *options = build_command(*arguments)
            return [python, FORKING_SERVER, *options]

        with mock.patch.object(sglang_worker, "build_command", forking):
            return super()._launch(port, internal_port)

    def shutdown(self) -> None:
        super().shutdown()
        self._proxy.close()

    def arm(self, fault: EngineFault | None) -> None:
        self._proxy.arm(fault)

    def is_armed(self) -> bool:
        return self._proxy.is_armed

    def own_url(self) -> str:
        """Of the server itself, behind the proxy."""
        return self._own_url

    def family(self) -> list[int]:
        """Process ids of this actor and of everything that belongs to its server."""
        return [os.getpid(), self.pid(), *(process.pid for process in self._server_processes())]

    def act(self, what: str) -> None:
        """Carry out a process fault."""
        match what:
            case "kill actor":
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill server":
                _signal(self._server_processes(), signal.SIGKILL)
            case "stop server":
                _signal(self._server_processes(), signal.SIGSTOP)
            case "kill scheduler":
                _signal(self._schedulers(), signal.SIGKILL)
            case "stop scheduler":
                _signal(self._schedulers(), signal.SIGSTOP)
            case "stop scheduler, then kill":
                _signal(self._schedulers(), signal.SIGSTOP)
                # The call is forwarded meanwhile, and trainer rank 0 sends.
                threading.Timer(0.5, self.act, ["kill server"]).start()
            case _:
                raise ValueError(f"process fault: got {what!r}; see FaultyEngine")

    def _server_processes(self) -> list[psutil.Process]:
        return psutil.Process(self.pid()).children(recursive=True)

    def _schedulers(self) -> list[psutil.Process]:
        found = [p for p in self._server_processes() if "scheduler" in " ".join(p.cmdline())]
        if not found:
            raise AssertionError(f"engine {self._engine_index}: no scheduler among its processes")
        return found


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        process.send_signal(number)


@dataclass(frozen=True)
class RankFault:
    """What a trainer rank does, once, in its next refit."""

    kind: str
    """`raise`, `stop` (SIGSTOP), `kill` (SIGKILL), `slow` (sleeps `seconds`)."""
    tensor: int
    """Before it yields this one (from 0); -1: after the last."""
    seconds: float = 0.0


class FaultyTrainer(DTensorPolicyWorkerV2):
    """A real rank whose generator of weights can fail."""

    _fault: RankFault | None = None

    def arm(self, fault: RankFault | None) -> None:
        self._fault = fault

    def process_id(self) -> int:
        return os.getpid()

    def resident_bytes(self) -> int:
        return int(psutil.Process().memory_info().rss)

    def prepare_weight_update(self, **arguments: Any) -> None:
        with self._faulty_generator():
            super().prepare_weight_update(**arguments)

    def update_weights_to_sglang_distributed(self, **arguments: Any) -> RefitStats:
        try:
            with self._faulty_generator():
                return super().update_weights_to_sglang_distributed(**arguments)
        finally:
            self._fault = None

    @contextmanager
    def _faulty_generator(self) -> Iterator[None]:
        """Of the walk that is made within, and goes on afterwards."""
        fault = self._fault
        if fault is None:
            yield
            return
        generator = dtensor_policy_worker_v2.dtensor_params_generator

        def failing(*args: Any, **kwargs: Any) -> Iterator[Any]:
            for index, item in enumerate(generator(*args, **kwargs)):
                if index == fault.tensor:
                    _fail(fault)
                yield item
            if fault.tensor == -1:
                _fail(fault)

        with mock.patch.object(dtensor_policy_worker_v2, "dtensor_params_generator", failing):
            yield


def _fail(fault: RankFault) -> None:
    match fault.kind:
        case "raise":
            raise RuntimeError("injected failure of a rank")
        case "slow":
            time.sleep(fault.seconds)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
