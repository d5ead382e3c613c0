"""What a policy offers to the algorithm and to the refit."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_rl.config.schema import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.weight_transfer.receiver import Receiver
from nemo_rl.distributed.weight_transfer.sender import RefitStats

LossFunction = Callable[[torch.Tensor, BatchedDataDict, "LossNormalizer"], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(log-probs `[batch, seq - 1]` float32 with gradient, micro-batch, normalizer) -> (loss, metrics).

Both are already divided by the normalizer, so that the sum over all micro-batches and ranks is the value for the
global batch, whatever its split.
"""


@dataclass(frozen=True)
class LossNormalizer:
    """What the global batch of one optimizer step holds, over all ranks."""

    num_tokens: int
    """Response tokens: sum of `token_mask[:, 1:] * sample_mask[:, None]`."""
    num_samples: int
    """Sum of `sample_mask`."""


@dataclass(frozen=True)
class TrainResult:
    """Means over the optimizer steps of one `train` call."""

    loss: float
    grad_norm: float
    lr: float
    metrics: Mapping[str, float]


class PolicyInterface(ABC):
    cfg: PolicyConfig

    @abstractmethod
    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """`input_ids [batch, seq]`, `input_lengths [batch]` -> `logprobs [batch, seq]` float32.

        Position t holds log p(input_ids[t] | input_ids[:t]) at the sampling temperature; position 0 and padding: 0.
        """

    @abstractmethod
    def get_reference_policy_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """The same from the frozen initial policy, as `reference_logprobs [batch, seq]`."""

    @abstractmethod
    def train(self, data: BatchedDataDict, loss_fn: LossFunction) -> TrainResult:
        """One optimizer step per `train_global_batch_size` samples.

        `data` holds `input_ids [batch, seq]`, `input_lengths [batch]`, `token_mask [batch, seq]` (1 on response
        tokens), `sample_mask [batch]`, and what the loss reads.
        """

    @abstractmethod
    def export_hf(self, folder: str, *, timeout_s: float | None = None) -> None:
        """Write model and tokenizer as a Hugging Face folder in `precision`, adapters merged.

        `timeout_s` None: as long as a step may take.
        """

    @abstractmethod
    def export_adapter(self, folder: str) -> None:
        """Write the adapters of a LoRA policy alone, in float32, as a folder that peft loads on the base model."""

    @abstractmethod
    def free_memory_bytes(self) -> int:
        """The least free device memory of any rank."""

    @abstractmethod
    def connect_sglang_rollout_engines_distributed(
        self,
        *,
        rollout_engines: Sequence[Receiver],
        engine_gpu_counts: list[int],
        group_name: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Make the weight-update group: trainer rank 0 and every engine rank. Called on every trainer rank.

        `timeout_s` is what is left of the caller's deadline; None: `refit_timeout_s`.
        """

    @abstractmethod
    def prepare_weight_update(self, *, buffer_size_bytes: int, timeout_s: float | None = None) -> str:
        """Have every rank gather the first bucket; returns at once, with the ticket to go on from there."""

    @abstractmethod
    def update_weights_to_sglang_distributed(
        self,
        *,
        rollout_engines: Sequence[Receiver],
        buffer_size_bytes: int,
        rollout_engine_lock: Any = None,
        target_precision: str = "bf16",
        sglang_quantization_cfg: Mapping[str, Any] | None = None,
        negated: bool = False,
        ticket: str | None = None,
        timeout_s: float | None = None,
    ) -> RefitStats:
        """Send every weight to every engine. Called on every trainer rank; every rank raises or none does.

        `negated` sends -x for each weight x, to see what of the engines the weights reach. `ticket`: of
        `prepare_weight_update`, when no weight has changed since.

        `rollout_engine_lock` is part of the ecosystem's signature: here the driver alone calls, so None will do.
        """

    @abstractmethod
    def disconnect_sglang_rollout_engines_distributed(self, *, timeout_s: float | None = None) -> None:
        """Take the weight-update group down on both sides. Idempotent. `timeout_s` None: `refit_timeout_s`."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the ranks. Idempotent."""
