"""Log-probs and one optimizer step, as functions of a sharded model and a rank's part of the batch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler
from transformers import PreTrainedModel

from nemo_rl.config.schema import OptimizerConfig, SchedulerConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.aux_loss import AuxLoss
from nemo_rl.models.policy.interfaces import LossFunction, LossNormalizer, TrainResult
from nemo_rl.models.policy.parallelize import compute_device, fsdp_modules, reshard
from nemo_rl.models.policy.shards import TP_AXIS, is_first_copy
from nemo_rl.models.policy.vision import Pictures, forward_inputs

CHUNK_ELEMENTS = 1 << 22
"""Logits that are held in float32 at a time."""


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    """Of those that are trained."""
    kwargs = config.kwargs
    beta1, beta2 = kwargs.betas
    return torch.optim.AdamW(
        [parameter for parameter in parameters if parameter.requires_grad],
        lr=kwargs.lr,
        weight_decay=kwargs.weight_decay,
        betas=(beta1, beta2),
        eps=kwargs.eps,
        fused=True,
    )


def make_scheduler(optimizer: Optimizer, config: SchedulerConfig | None) -> LRScheduler | None:
    return LinearLR(optimizer, **config.kwargs.model_dump()) if config else None


@dataclass(frozen=True)
class _Vocabulary:
    """The ids whose logits this rank has: `start` and those after it."""

    start: int = 0
    group: dist.ProcessGroup | None = None
    """The ranks that have the others; None: there are none."""


def _vocabulary(model: PreTrainedModel) -> _Vocabulary:
    weight = model.get_output_embeddings().weight
    axes = weight.device_mesh.mesh_dim_names or () if isinstance(weight, DTensor) else ()
    if TP_AXIS not in axes or not weight.placements[-1].is_shard(0):
        return _Vocabulary()
    axis = len(axes) - 1
    num_rows = weight.shape[0] // weight.device_mesh.size(axis)
    return _Vocabulary(weight.device_mesh.get_local_rank(axis) * num_rows, weight.device_mesh.get_group(axis))


class _GatheredLogSoftmax(torch.autograd.Function):
    """log_softmax(logits / temperature)[label] in float32, holding only a chunk of rows in float32 at a time.

    `logits [n, vocab]` may be a part of the vocabulary: ranks exchange two numbers a row then, and no logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, temperature: float, vocabulary: _Vocabulary
    ) -> torch.Tensor:
        log_norm = logits.new_empty(logits.shape[0], dtype=torch.float32)
        for rows in _row_chunks(logits):
            torch.logsumexp(logits[rows].float() / temperature, dim=-1, out=log_norm[rows])
        columns = labels - vocabulary.start
        is_own = (columns >= 0) & (columns < logits.shape[1])
        columns = columns.masked_fill(~is_own, 0)
        chosen = logits.gather(1, columns[:, None]).squeeze(1).float() / temperature
        if vocabulary.group is not None and labels.numel():
            log_norm, chosen = _join(log_norm, chosen.masked_fill(~is_own, 0.0), vocabulary.group)
        ctx.save_for_backward(logits, columns, is_own, log_norm)
        ctx.temperature = temperature
        return chosen - log_norm

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, columns, is_own, log_norm = ctx.saved_tensors
        scale = grads[0][:, None] / ctx.temperature
        own_scale = scale * is_own[:, None]
        grad_logits = torch.empty_like(logits)
        for rows in _row_chunks(logits):
            probs = logits[rows].float().div_(ctx.temperature).sub_(log_norm[rows, None]).exp_()
            probs.mul_(-scale[rows]).scatter_add_(1, columns[rows, None], own_scale[rows])
            grad_logits[rows] = probs
        return grad_logits, None, None, None


def _join(log_norm: torch.Tensor, chosen: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """`[n]` each: log of the sum over all parts of the vocabulary, and the logit that one part has and others have as 0."""
    own = torch.stack([log_norm, chosen])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    norms, logits = torch.stack(parts, dim=1)
    return norms.logsumexp(0), logits.sum(0)


def _row_chunks(logits: torch.Tensor) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // logits.shape[1])
    return (slice(start, start + step) for start in range(0, logits.shape[0], step))


def token_logprobs(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    selected: torch.Tensor,
    temperature: float,
    pictures: Sequence[Pictures] | None = None,
) -> torch.Tensor:
    """Log-prob of each selected token given those before it.

    The output head runs at the selected positions alone: with a large vocabulary it would otherwise spend most of its
    time and memory on prompts and padding. No attention mask is passed: padding is on the right, and causal attention
    does not look there.

    Args:
        input_ids: `[batch, seq]` int64, right-padded.
        selected: `[batch, seq - 1]` bool; column t stands for token t + 1.
        pictures: of each sample; None: a run without pictures.

    Returns:
        `[batch, seq - 1]` float32, 0 where not selected.
    """
    rows, columns = selected.nonzero(as_tuple=True)
    with (
        forward_inputs(model, input_ids, pictures) as inputs,
        _head_at(model, rows * inputs["input_ids"].shape[1] + columns),
    ):
        logits = model(**inputs, use_cache=False).logits[0]
    labels = input_ids[rows, columns + 1]
    values = _GatheredLogSoftmax.apply(logits, labels, temperature, _vocabulary(model))
    return values.new_zeros(selected.shape).index_put((rows, columns), values)


@contextmanager
def _head_at(model: PreTrainedModel, positions: torch.Tensor) -> Iterator[None]:
    """Within, the output head sees hidden states `[1, n, hidden]`: those at `positions` of the flat `[batch * seq]`."""

    def select(_: nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return args[0].flatten(0, 1).index_select(0, positions).unsqueeze(0)

    handle = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def compute_logprobs(
    model: PreTrainedModel, data: BatchedDataDict, *, micro_batch_size: int, temperature: float
) -> torch.Tensor:
    """Log-probs of a rank's samples, `[batch, seq]` float32; position 0 and padding are 0. Collective.

    Where `data` has a `token_mask`, only its tokens are computed and the others are 0. Where it has `multimodal`, that is
    each sample's `Pictures`.
    """
    input_ids = data["input_ids"]
    out = torch.zeros(input_ids.shape, dtype=torch.float32)
    order = _by_length(data)
    for index in order.split(micro_batch_size):
        micro_batch = _trimmed(data.select_indices(index.tolist())).to(compute_device(model))
        values = _micro_batch_logprobs(model, micro_batch, temperature)
        out[index, 1 : values.shape[1] + 1] = values.cpu()
    reshard(model)
    return out


def _micro_batch_logprobs(model: PreTrainedModel, data: BatchedDataDict, temperature: float) -> torch.Tensor:
    selected = _selected_tokens(data)
    return token_logprobs(model, data["input_ids"], selected, temperature, data.get("multimodal"))


def _by_length(data: BatchedDataDict) -> torch.Tensor:
    """Sample indices, longest first: micro-batches of like lengths need little padding."""
    order: torch.Tensor = data["input_lengths"].argsort(descending=True, stable=True)
    return order


def _trimmed(data: BatchedDataDict) -> BatchedDataDict:
    """Cut every `[batch, seq, ...]` tensor to the longest sample (at least 2 tokens, so that one can be predicted)."""
    seq = data["input_ids"].shape[1]
    width = max(2, int(data["input_lengths"].max()))
    return BatchedDataDict(
        {
            name: value[:, :width] if isinstance(value, torch.Tensor) and value.shape[1:2] == (seq,) else value
            for name, value in data.items()
        }
    )


def _selected_tokens(data: Mapping[str, Any]) -> torch.Tensor:
    """`[batch, seq - 1]` bool: response tokens where a `token_mask` tells them, else all that are no padding."""
    input_ids = data["input_ids"]
    columns = torch.arange(1, input_ids.shape[1], device=input_ids.device)
    selected: torch.Tensor = columns < data["input_lengths"][:, None]
    if "token_mask" in data:
        selected = selected & data["token_mask"][:, 1:].bool()
    if "sample_mask" in data:
        selected = selected & data["sample_mask"][:, None].bool()
    return selected


def train_on_batch(
    model: PreTrainedModel,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    data: BatchedDataDict,
    loss_fn: LossFunction,
    *,
    micro_batch_size: int,
    temperature: float,
    max_grad_norm: float | None,
    group: dist.ProcessGroup | None = None,
) -> TrainResult:
    """One optimizer step over the samples of all ranks; `data` is this rank's part. Collective.

    The loss that is returned has the model's auxiliary loss in it, where there is one.

    Args:
        group: the data-parallel ranks; None: all. Ranks that share matrices hold the same samples.

    Raises:
        AssertionError: on every rank, when the parts differ in size (their numbers of collectives would too).
        FloatingPointError: on every rank and before the step, when the gradient norm is not finite.
    """
    normalizer = global_normalizer(data, compute_device(model), group)
    aux_loss = AuxLoss(model, data, group)
    sums = _accumulate_gradients(model, data, loss_fn, normalizer, aux_loss, micro_batch_size, temperature)
    totals = _sum_over_ranks(sums, compute_device(model), group)
    grad_norm = clip_gradients(model.parameters(), max_grad_norm)
    if not torch.isfinite(grad_norm):
        optimizer.zero_grad()
        raise FloatingPointError(f"gradient norm is {grad_norm.item()}; loss {totals['loss']}: no step was made")
    lr = float(optimizer.param_groups[0]["lr"])
    optimizer.step()
    optimizer.zero_grad()
    if scheduler is not None:
        scheduler.step()
    loss = totals.pop("loss")
    return TrainResult(loss=loss, grad_norm=grad_norm.item(), lr=lr, metrics=totals)


def global_normalizer(
    data: BatchedDataDict, device: torch.device, group: dist.ProcessGroup | None = None
) -> LossNormalizer:
    """Count response tokens and samples over all ranks, and check that every rank holds as many rows."""
    sample_mask = data["sample_mask"].double()
    num_tokens = (data["token_mask"][:, 1:].double() * sample_mask[:, None]).sum().item()
    counts = torch.tensor([num_tokens, sample_mask.sum().item(), data.size, data.size**2], dtype=torch.float64)
    counts = counts.to(device)
    dist.all_reduce(counts, group=group)
    tokens, samples, rows, squared_rows = counts.tolist()
    # Equal on every rank if and only if n * sum(x^2) == sum(x)^2: all ranks see the same two sums.
    if squared_rows * dist.get_world_size(group) != rows**2:
        raise AssertionError(f"ranks hold different numbers of samples; this one {data.size} of {int(rows)}")
    return LossNormalizer(num_tokens=round(tokens), num_samples=round(samples))


def _accumulate_gradients(
    model: PreTrainedModel,
    data: BatchedDataDict,
    loss_fn: LossFunction,
    normalizer: LossNormalizer,
    aux_loss: AuxLoss,
    micro_batch_size: int,
    temperature: float,
) -> dict[str, torch.Tensor]:
    """Backward through every micro-batch; returns this rank's sums of the loss and of the metrics."""
    sums: dict[str, torch.Tensor] = {}
    indices = _by_length(data).split(micro_batch_size)
    for number, index in enumerate(indices):
        micro_batch = _trimmed(data.select_indices(index.tolist())).to(compute_device(model))
        _set_last(model, number == len(indices) - 1)
        with aux_loss.recorded(micro_batch) as balance:
            logprobs = _micro_batch_logprobs(model, micro_batch, temperature)
        loss, metrics = loss_fn(logprobs, micro_batch, normalizer)
        for value in balance:
            loss, metrics = loss + aux_loss.coefficient * value, metrics | {"aux_loss": value}
        loss.backward()
        for name, value in {**metrics, "loss": loss}.items():
            sums[name] = sums.get(name, 0.0) + value.detach().double()
    return sums


def _set_last(model: PreTrainedModel, is_last: bool) -> None:
    """On CPU gather and reduce once per step; on cuda in each micro-batch, since whole gradients would not fit."""
    deferred = compute_device(model).type == "cpu" and not is_last
    for module in fsdp_modules(model):
        module.set_requires_gradient_sync(not deferred, recurse=False)
        module.set_reshard_after_backward(not deferred, recurse=False)


def _sum_over_ranks(
    sums: Mapping[str, torch.Tensor], device: torch.device, group: dist.ProcessGroup | None
) -> dict[str, float]:
    names = sorted(sums)
    values = torch.stack([sums[name].to(device) for name in names])
    dist.all_reduce(values, group=group)
    return dict(zip(names, values.tolist(), strict=True))


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Scale gradients to a total L2 norm of at most `max_norm`; returns the norm before, over all ranks. Collective.

    Of what tensor-parallel ranks hold alike, one copy counts.
    """
    grads = [parameter.grad for parameter in parameters if isinstance(parameter.grad, DTensor)]
    counted = [grad.to_local() for grad in grads if is_first_copy(grad)]
    square = nn.utils.get_total_norm(counted).double().square()
    if grads:
        square = square.to(grads[0].to_local().device)
    dist.all_reduce(square)
    total = square.sqrt().float()
    if max_norm is not None and torch.isfinite(total):
        torch._foreach_mul_([grad.to_local() for grad in grads], (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total
