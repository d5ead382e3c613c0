"""One actor per rank, called together."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from nemo_rl.distributed.virtual_cluster import RayVirtualCluster

logger = logging.getLogger(__name__)

_GRACE_S = 10.0
"""How long the other ranks have to answer once one has failed."""


class WorkerGroupError(RuntimeError):
    """One rank failed and the others cannot go on: the group is ended."""


class RayWorkerGroup:
    """The ranks of one distributed program.

    A call goes to every rank, since any of them may enter a collective. When a rank fails and the others do not answer
    soon after, or when the deadline passes, all ranks are ended: no rank is left waiting in a collective.
    """

    def __init__(
        self,
        *,
        name: str,
        worker_class: type,
        cluster: RayVirtualCluster,
        env: Mapping[str, str],
        make_kwargs: Callable[[int], Mapping[str, Any]],
    ):
        self.name = name
        actor_class: Any = ray.remote(worker_class)
        self._workers: list[Any] = [
            actor_class.options(**cluster.actor_options(rank, env)).remote(**make_kwargs(rank))
            for rank in range(cluster.num_bundles)
        ]

    @property
    def num_ranks(self) -> int:
        return len(self._workers)

    def run(
        self, method: str, *, timeout_s: float, per_rank: Sequence[tuple[Any, ...]] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call `method` on every rank and return the answers in rank order.

        Args:
            timeout_s: for all ranks together.
            per_rank: positional arguments of each rank; `kwargs` go to all.

        Raises:
            TimeoutError, WorkerGroupError: the group is ended.
            Exception: what the ranks raised, when all of them answered; the group lives on.
        """
        if not self._workers:
            raise WorkerGroupError(f"{self.name}: the ranks have ended")
        arguments = per_rank or [()] * len(self._workers)
        # One actor task per rank; `__ray_ready__` waits for the constructor.
        refs = [
            getattr(worker, method).remote(*args, **kwargs)
            for worker, args in zip(self._workers, arguments, strict=True)
        ]
        self._await(method, refs, timeout_s)
        return ray.get(refs)

    def start(self, method: str, **kwargs: Any) -> None:
        """Call `method` on every rank and do not wait: the next `run` waits for it too, since ranks go one call at a time.

        What it raises is lost.

        Raises:
            WorkerGroupError: the group has ended.
        """
        if not self._workers:
            raise WorkerGroupError(f"{self.name}: the ranks have ended")
        for worker in self._workers:
            getattr(worker, method).remote(**kwargs)

    def ready(self, *, timeout_s: float) -> None:
        """Wait for every constructor."""
        self.run("__ray_ready__", timeout_s=timeout_s)

    def _await(self, method: str, refs: list[Any], timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        failures: dict[int, RayError] = {}
        pending = list(refs)
        while pending:
            done, pending = ray.wait(pending, timeout=max(0.0, end_s - time.monotonic()))
            if not done:
                break
            if (error := self._failure_of(done[0])) is not None:
                end_s = min(end_s, time.monotonic() + _GRACE_S)
                failures[refs.index(done[0])] = error
        if not pending and not failures:
            return
        if not failures:
            missing = [rank for rank, ref in enumerate(refs) if ref in pending]
            self.shutdown()
            raise TimeoutError(
                f"{self.name}: {method} not done within {round(timeout_s, 1):g} s on ranks {missing}; all ranks ended"
            )
        # When a rank dies, others that shared a collective with it fail first: the dead one is the reason.
        rank = next(
            (rank for rank, error in failures.items() if not isinstance(error, RayTaskError)), next(iter(failures))
        )
        error = failures[rank]
        if pending or not isinstance(error, RayTaskError):
            self.shutdown()
            raise WorkerGroupError(
                f"{self.name}: rank {rank} failed in {method}, all ranks ended: {_plain(error)}"
            ) from error
        raise _cause(error)

    def _failure_of(self, ref: Any) -> RayError | None:
        """RayTaskError: what the rank raised. Anything else: it has ended, or its answer has; not all are RayActorErrors."""
        try:
            ray.get(ref, timeout=0)
        except RayError as error:
            return error
        return None

    def shutdown(self) -> None:
        """End every rank. Idempotent."""
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []


def why_ended(error: RayError) -> str:
    """Why an actor does not answer, in one line; Ray takes a dozen."""
    if not isinstance(error, RayActorError):
        # Ray's memory monitor has killed it, or it could not be started.
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if error.actor_init_failed:
        return str(error).strip().splitlines()[-1]
    return "its process has ended (killed, or out of memory)"


def _cause(error: RayError) -> Exception:
    cause = error.cause if isinstance(error, RayTaskError) else error
    return cause if isinstance(cause, Exception) else error


def _plain(error: RayError) -> str:
    if not isinstance(error, RayTaskError):
        return f"{why_ended(error)}; its log is in the run folder"
    return f"{type(_cause(error)).__name__}: {_cause(error)}"
