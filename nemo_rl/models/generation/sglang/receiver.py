"""An engine as the sending trainer rank sees it: calls to its actor, answered by plain futures."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError, RayTaskError

from nemo_rl.distributed.weight_transfer.buckets import BucketHeader
from nemo_rl.distributed.weight_transfer.receiver import GroupSpec
from nemo_rl.distributed.worker_group import why_ended


@dataclass(frozen=True)
class RayReceiver:
    """Implements `Receiver` over an SGLangGenerationWorker actor. Picklable."""

    name: str
    actor: Any
    takes_flattened: bool
    nccl_cumem_enable: str | None = None

    def join(self, group: GroupSpec, rank_offset: int, timeout_s: float) -> Future[None]:
        return _plain_future(
            self.actor.init_weights_update_group.remote(
                master_address=group.master_address,
                master_port=group.master_port,
                rank_offset=rank_offset,
                world_size=group.world_size,
                group_name=group.name,
                backend=group.backend,
                timeout_s=timeout_s,
            )
        )

    def announce(self, header: BucketHeader, group_name: str, timeout_s: float) -> Future[None]:
        return _plain_future(
            self.actor.update_weights_from_distributed.remote(
                names=list(header.names),
                dtypes=list(header.dtypes),
                shapes=[list(shape) for shape in header.shapes],
                group_name=group_name,
                load_format="flattened_bucket" if header.flattened else None,
                timeout_s=timeout_s,
            )
        )

    def leave(self, group_name: str, timeout_s: float) -> Future[None]:
        return _plain_future(self.actor.destroy_weights_update_group.remote(group_name=group_name, timeout_s=timeout_s))


def _plain_future(reference: Any) -> Future[None]:
    """A future that fails with what the actor raised, not with Ray's wrapping of it."""
    plain: Future[None] = Future()

    def settle(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            plain.set_result(None)
        elif isinstance(error, RayError) and not isinstance(error, RayTaskError):
            plain.set_exception(RuntimeError(why_ended(error)))
        else:
            plain.set_exception(error.cause if isinstance(error, RayTaskError) else error)

    reference.future().add_done_callback(settle)
    return plain
