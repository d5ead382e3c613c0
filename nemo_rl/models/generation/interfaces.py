"""What a generation backend offers to rollouts and to the refit."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.receiver import Receiver


class GenerationInterface(ABC):
    @abstractmethod
    def generate(self, data: BatchedDataDict, *, greedy: bool = False) -> BatchedDataDict:
        """Sample one response per row.

        Args:
            data: `input_ids [batch, prompt_len]` int64, right-padded; `input_lengths [batch]` int64; optionally
                `stop_strings`, a list of `list[str] | None` per sample, added to the configured ones.
            greedy: temperature 0 (validation).

        Returns:
            `output_ids [batch, total_len]` int64, prompt then response, right-padded;
            `logprobs [batch, total_len]` float32, the engine's log-prob of each response token, 0 elsewhere;
            `generation_lengths [batch]`, `unpadded_sequence_lengths [batch]` int64;
            `truncated [batch]` bool: ended by length, or by an abort;
            `weight_version`: list of str, as the engine reports it.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End the engines and everything they started. Idempotent."""


class UpdatableGeneration(GenerationInterface):
    """A backend whose engines take new weights. Each call reaches every engine and is done when all have answered.

    All raise the backend's own error when an engine refuses or fails, and TimeoutError at the deadline.
    """

    @property
    @abstractmethod
    def rollout_engines(self) -> Sequence[Receiver]: ...

    @property
    @abstractmethod
    def engine_gpu_counts(self) -> list[int]:
        """Ranks of each engine in the weight-update group."""

    @property
    @abstractmethod
    def refit_timeout_s(self) -> float:
        """For one whole refit."""

    @property
    @abstractmethod
    def num_new_engines(self) -> int:
        """Engines that no weight-update group has seen."""

    @abstractmethod
    def clear_updatable_num_new_engines(self) -> None:
        """All engines are in the group now."""

    @abstractmethod
    def pause(self, deadline: Deadline) -> None:
        """Stop all requests, then drop the KV cache: its entries are of the old weights."""

    @abstractmethod
    def begin_weight_update(self, deadline: Deadline) -> None: ...

    @abstractmethod
    def end_weight_update(self, deadline: Deadline) -> None: ...

    @abstractmethod
    def weight_checksums(self, deadline: Deadline) -> list[dict[str, str]]:
        """Per engine: `rank/parameter` -> the engine's own digest of what it holds."""

    @abstractmethod
    def update_weights_from_disk(self, folder: str, deadline: Deadline) -> None:
        """Load a Hugging Face folder that every engine sees."""

    @abstractmethod
    def set_weight_version(self, version: int, deadline: Deadline) -> None:
        """The version that samples report from now on."""

    @abstractmethod
    def resume(self, deadline: Deadline) -> None: ...
