"""What a generation backend offers to rollouts and to the refit."""

from abc import ABC, abstractmethod

from nemo_rl.distributed.batched_data_dict import BatchedDataDict


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
