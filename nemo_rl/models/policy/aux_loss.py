"""The load-balancing loss of a mixture of experts, as the model has it, where its config asks for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.parallelize import compute_device


def aux_loss_coefficient(model: PreTrainedModel) -> float:
    """`router_aux_loss_coef` of the model's config where `output_router_logits` is true there, else 0."""
    config = model.config.get_text_config()
    is_on = getattr(config, "output_router_logits", False)
    return float(getattr(config, "router_aux_loss_coef", None) or 0.0) if is_on else 0.0


class AuxLoss:
    """Of one optimizer step.

    The loss is not linear in the tokens: it multiplies two means over those of one forward pass. Micro-batches are
    weighted by their part of the global batch's tokens, padding not counted, so that the sum over micro-batches and
    ranks is the mean over tokens. What stays of the split is that tokens are balanced within their micro-batch.
    """

    def __init__(self, model: PreTrainedModel, data: BatchedDataDict, group: dist.ProcessGroup | None = None) -> None:
        """`data` is this rank's part of the batch. Collective, where the model's config asks for the loss."""
        self.coefficient = aux_loss_coefficient(model)
        self._model = model
        self._num_tokens = 0.0
        if self.coefficient:
            counted = data["input_lengths"].sum().double().to(compute_device(model))
            dist.all_reduce(counted, group=group)
            self._num_tokens = counted.item()

    @contextmanager
    def recorded(self, micro_batch: BatchedDataDict) -> Iterator[list[torch.Tensor]]:
        """Within, a forward pass adds the micro-batch's weighted loss to the list; nothing when it is not asked for.

        The attention mask that makes the model leave out padding joins the pass here: log-probs do not need it.

        Raises:
            ValueError: the config asks for the loss and this class of models has none.
        """
        losses: list[torch.Tensor] = []
        if not self.coefficient:
            yield losses
            return
        lengths = micro_batch["input_lengths"]
        weight = lengths.sum() / self._num_tokens

        def add_mask(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            # As wide as the pass has it: a picture may stand behind the padding.
            columns = torch.arange(kwargs["input_ids"].shape[1], device=lengths.device)
            return args, kwargs | {"attention_mask": (columns < lengths[:, None]).long()}

        def record(_: Any, args: tuple[Any, ...], output: Any) -> None:
            if output.get("aux_loss") is None:
                raise ValueError(
                    f"policy.model_name: {type(self._model).__name__} computes no auxiliary loss; "
                    "set output_router_logits to false in its config.json"
                )
            losses.append(output["aux_loss"] * weight)

        handles = [
            self._model.register_forward_pre_hook(add_mask, with_kwargs=True),
            self._model.register_forward_hook(record),
        ]
        try:
            yield losses
        finally:
            for handle in handles:
                handle.remove()
