"""The reference: the same model in one process, unsharded, trained by torch alone."""

import copy
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import policy_cases as cases
import torch
from safetensors.torch import load_file
from shapes import FAMILIES, Shape
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_rl.distributed.batched_data_dict import BatchedDataDict


@dataclass(frozen=True)
class Plain:
    losses: list[float]
    grad_norms: list[float]
    lrs: list[float]
    logprobs: list[torch.Tensor]
    """Of the first batch before and after the steps, `[batch, seq]`; 0 at position 0 and on padding."""
    start: dict[str, torch.Tensor]
    """What `save_pretrained` writes before the first step."""
    weights: dict[str, torch.Tensor]
    """What it writes after the last step."""


def make_batch(shape: Shape, step: int) -> BatchedDataDict:
    return cases.make_batch(step, vocab=FAMILIES[shape.family].vocab_size)


def train_plain(folder: str, shape: Shape) -> Plain:
    """Three steps; with bf16, gradients come from a bf16 copy."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    betas = (cases.ADAMW["betas"][0], cases.ADAMW["betas"][1])
    optimizer = torch.optim.AdamW(model.parameters(), **{**cases.ADAMW, "betas": betas}, foreach=False)
    start, before = saved(model), plain_logprobs(model, make_batch(shape, 0))
    losses, norms, lrs = [], [], []
    for step in range(cases.NUM_STEPS):
        factor = min(1.0, 0.5 + 0.5 * step / cases.WARM_UP["total_iters"])
        optimizer.param_groups[0]["lr"] = cases.ADAMW["lr"] * factor
        runner = model if shape.precision == "float32" else copy.deepcopy(model).to(torch.bfloat16)
        runner.zero_grad()
        loss = plain_loss(runner, make_batch(shape, step), shape)
        loss.backward()
        for master, copied in zip(model.parameters(), runner.parameters(), strict=True):
            master.grad = copied.grad.float()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), cases.MAX_GRAD_NORM).item())
        optimizer.step()
        losses.append(loss.item())
        lrs.append(optimizer.param_groups[0]["lr"])
    after = plain_logprobs(model, make_batch(shape, 0))
    return Plain(losses, norms, lrs, [before, after], start, saved(model))


def saved(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


def chosen_logprobs(model: PreTrainedModel, batch: BatchedDataDict) -> torch.Tensor:
    """`[batch, seq - 1]` by log_softmax over whole rows."""
    ids = batch["input_ids"]
    logits = model(input_ids=ids, attention_mask=attention_mask(batch)).logits.float() / cases.TEMPERATURE
    return torch.log_softmax(logits[:, :-1], -1).gather(2, ids[:, 1:, None]).squeeze(2)


def attention_mask(batch: BatchedDataDict) -> torch.Tensor:
    return (torch.arange(batch["input_ids"].shape[1]) < batch["input_lengths"][:, None]).long()


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, batch: BatchedDataDict) -> torch.Tensor:
    """Of response tokens; 0 elsewhere."""
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    return torch.nn.functional.pad(chosen_logprobs(model, batch) * mask, (1, 0))


def plain_loss(model: PreTrainedModel, batch: BatchedDataDict, shape: Shape) -> torch.Tensor:
    """Over the whole batch at once; the auxiliary loss, which is not linear in the tokens, as the shape splits it."""
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    loss = -(chosen_logprobs(model, batch) * batch["weights"][:, None] * mask).sum() / mask.sum()
    if not FAMILIES[shape.family].make_config().to_dict().get("output_router_logits"):
        return loss
    num_tokens = batch["input_lengths"].sum()
    for part in micro_batches(batch, shape):
        out = model(input_ids=part["input_ids"], attention_mask=attention_mask(part))
        loss = loss + model.config.router_aux_loss_coef * out.aux_loss * part["input_lengths"].sum() / num_tokens
    return loss


def micro_batches(batch: BatchedDataDict, shape: Shape) -> Iterator[BatchedDataDict]:
    """Each rank's part, longest samples first."""
    for part in batch.shard_by_batch_size(shape.num_data_ranks):
        order = part["input_lengths"].argsort(descending=True, stable=True)
        for rows in order.split(shape.micro_batch):
            yield part.select_indices(rows.tolist())
