"""Generation that outlives its engines: what the loop samples from."""

from collections.abc import Callable
from functools import partial

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.interfaces import EnginesLostError, GenerationInterface, UpdatableGeneration
from nemo_rl.weight_sync.interfaces import WeightSynchronizer


class RecoveringGeneration(GenerationInterface):
    """When the last engine is lost, has the engines replaced and refit, and finishes what was left to sample."""

    def __init__(self, generation: UpdatableGeneration, synchronizer: WeightSynchronizer):
        self._generation = generation
        self._synchronizer = synchronizer

    def generate(self, data: BatchedDataDict, *, greedy: bool = False) -> BatchedDataDict:
        """See `GenerationInterface`."""
        sample: Callable[[], BatchedDataDict] = partial(self._generation.generate, data, greedy=greedy)
        while True:
            try:
                return sample()
            except EnginesLostError:
                if not self._generation.replaces_failed_engines:
                    raise
                self._synchronizer.restore_engines()
                sample = self._generation.resume_generate

    def shutdown(self) -> None:
        self._generation.shutdown()
