"""An engine of this process, as the sender sees it."""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from nemo_rl.distributed.weight_transfer.buckets import BucketHeader
from nemo_rl.distributed.weight_transfer.receiver import GroupSpec
from nemo_rl.models.generation.sglang.sglang_worker import SGLangGenerationWorker


class WorkerReceiver:
    """Implements `Receiver` over a worker in this process."""

    takes_flattened = True
    nccl_cumem_enable = None

    def __init__(self, worker: SGLangGenerationWorker) -> None:
        self.name = "engine 0"
        self._worker = worker
        self._pool = ThreadPoolExecutor(4)

    def join(self, group: GroupSpec, rank_offset: int, timeout_s: float) -> Future[None]:
        place = (group.master_address, group.master_port, rank_offset, group.world_size, group.name, group.backend)
        return self._pool.submit(self._worker.init_weights_update_group, *place, timeout_s)

    def announce(self, header: BucketHeader, group_name: str, timeout_s: float) -> Future[None]:
        shapes = [list(shape) for shape in header.shapes]
        update = partial(
            self._worker.update_weights_from_distributed, load_format="flattened_bucket", timeout_s=timeout_s
        )
        return self._pool.submit(update, list(header.names), list(header.dtypes), shapes, group_name)

    def leave(self, group_name: str, timeout_s: float) -> Future[None]:
        return self._pool.submit(self._worker.destroy_weights_update_group, group_name, timeout_s)
