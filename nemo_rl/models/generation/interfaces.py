"""What a generation backend offers to rollouts and to the refit."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.receiver import Receiver


class EnginesFailedError(RuntimeError):
    """Some engines failed. Survives pickling."""

    def __init__(self, faults: Mapping[str, str]) -> None:
        """`faults`: what went wrong, in the engine's own words where it spoke, by the engine's name."""
        super().__init__(dict(faults))
        self.faults = dict(faults)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.faults)

    def __str__(self) -> str:
        # An engine's own error begins with its name.
        faults = self.faults.items()
        return "; ".join(fault if fault.startswith(name) else f"{name}: {fault}" for name, fault in faults)


class EnginesLostError(EnginesFailedError):
    """No engine is left that could take a request. What was sampled until then is kept; see `resume_generate`."""


class ReplacementsUsedUpError(RuntimeError):
    """Engines have failed and no more may be replaced: the run cannot go on."""


class GenerationInterface(ABC):
    @abstractmethod
    def generate(self, data: BatchedDataDict, *, greedy: bool = False) -> BatchedDataDict:
        """Sample one response per row.

        Args:
            data: `input_ids [batch, prompt_len]` int64, right-padded; `input_lengths [batch]` int64; optionally
                `stop_strings`, a list of `list[str] | None` per sample, added to the configured ones; and `images`, a
                list of data URIs per sample, whose image tokens `input_ids` holds.
            greedy: temperature 0 (validation).

        Returns:
            `output_ids [batch, total_len]` int64, prompt then response, right-padded;
            `logprobs [batch, total_len]` float32, the engine's log-prob of each response token, 0 elsewhere;
            `generation_lengths [batch]`, `unpadded_sequence_lengths [batch]` int64;
            `truncated [batch]` bool: ended by length, or by an abort;
            `weight_version`: list of str, as the engine reports it.

        Raises:
            EnginesLostError: the last engine has failed, and may be replaced (`replaces_failed_engines`).
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End the engines and everything they started. Idempotent."""


class UpdatableGeneration(GenerationInterface):
    """A backend whose engines take new weights. Each call reaches every ready engine, and is done when all have answered.

    An engine is ready, quarantined or dead. It leaves ready when `quarantine` names it, or when the backend finds it
    dead; `replace_failed` puts a new one in its place. An engine's name is that of its receiver and is never used again.

    All calls with a deadline raise EnginesFailedError with every engine that refused, failed, or did not answer in time,
    and TimeoutError when the deadline has passed before they begin.
    """

    @abstractmethod
    def resume_generate(self) -> BatchedDataDict:
        """Finish what `generate` left when it raised EnginesLostError, after the engines have been replaced and refit.

        Samples that had finished are not sampled again: serve the same weights, under the same version.
        """

    @property
    @abstractmethod
    def rollout_engines(self) -> Sequence[Receiver]:
        """The ready engines, in the order of their ranks."""

    @property
    @abstractmethod
    def engine_gpu_counts(self) -> list[int]:
        """Ranks of each ready engine in the weight-update group."""

    @property
    @abstractmethod
    def replaces_failed_engines(self) -> bool:
        """Whether failed engines are to be replaced; false: the run ends with the first failure."""

    @property
    @abstractmethod
    def failed_engines(self) -> Mapping[str, str]:
        """What is wrong with each engine that is quarantined or dead and not yet replaced, by its name."""

    @abstractmethod
    def quarantine(self, names: Iterable[str], why: str = "a refit failed") -> None:
        """Never resume these engines and send no more requests there: they may hold a part of the new weights.

        Engines that are not ready stay what they are.

        Raises:
            ValueError: there has never been an engine of that name.
        """

    @abstractmethod
    def replace_failed(self, deadline: Deadline) -> list[str]:
        """End every failed engine, start a new one in its place and wait until it serves; returns the new names.

        A new engine holds the checkpoint that the run started from. It gets requests from the `resume` on that follows
        its first refit, and raises `num_new_engines`.

        Raises:
            ReplacementsUsedUpError: more engines have failed than may be replaced; nothing has been ended.
            EnginesFailedError: a new engine did not start in time; it has failed, and may be replaced in its turn.
        """

    @property
    @abstractmethod
    def refit_timeout_s(self) -> float:
        """For one whole refit."""

    @property
    @abstractmethod
    def num_new_engines(self) -> int:
        """Engines that came or went since the last weight-update group was made; not 0: make a new one."""

    @abstractmethod
    def clear_updatable_num_new_engines(self) -> None:
        """The group has exactly the engines that are ready."""

    @abstractmethod
    def free_memory_bytes(self, deadline: Deadline) -> int:
        """The least free device memory of any ready engine."""

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
    def resume(self, deadline: Deadline) -> None:
        """Let every ready engine generate, and send requests to these and no others."""
