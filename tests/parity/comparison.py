"""A shape against the plain model, as numbers and as a row of the table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from plain import Plain
from ranks import NUM_EXPORTS, Seen
from shapes import Shape

TOLERANCE = 1e-5
"""Of every difference, in float32."""
HEADING = (
    "| shape | ranks | loss | gradient norm | log-probs | weights | stream |",
    "|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Comparison:
    """The greatest differences over three steps and over all ranks."""

    loss: float
    grad_norm: float
    """Relative."""
    logprobs: float
    """Before and after the steps."""
    weights: float
    """After the steps."""
    num_tensors: int
    """That the plain model saves."""
    num_equal: int
    """Of these, streamed before the first step under the same name, in the same shape and bit for bit."""
    are_exports_equal: bool
    """Whether five exports after the last step are one and the same, under the names and in the shapes of a save."""

    @property
    def is_equal(self) -> bool:
        differences = (self.loss, self.grad_norm, self.logprobs, self.weights)
        is_stream = self.num_equal == self.num_tensors and self.are_exports_equal
        return is_stream and all(difference < TOLERANCE for difference in differences)


def compare(ranks: Sequence[Seen], plain: Plain, shape: Shape) -> Comparison:
    """Rank 0 has the stream, every rank its part of the log-probs."""
    results = [(seen.results[step], step) for seen in ranks for step in range(len(plain.losses))]
    parts = ranks[:: shape.num_ranks // shape.num_data_ranks]
    logprobs = [torch.cat([seen.before for seen in parts]), torch.cat([seen.after for seen in parts])]
    first = ranks[0]
    is_saved_alike = _shapes(first.weights) == _shapes(plain.weights)
    return Comparison(
        loss=max(abs(result.loss - plain.losses[step]) for result, step in results),
        grad_norm=max(abs(result.grad_norm / plain.grad_norms[step] - 1) for result, step in results),
        logprobs=max(_distance(ours, theirs) for ours, theirs in zip(logprobs, plain.logprobs, strict=True)),
        weights=max(_distance(first.weights[name], plain.weights[name]) for name in plain.weights)
        if is_saved_alike
        else math.inf,
        num_tensors=len(plain.start),
        num_equal=_num_equal(first.start, plain.start),
        are_exports_equal=is_saved_alike
        and len(first.exports) == NUM_EXPORTS
        and all(_num_equal(again, first.weights) == len(plain.weights) for again in first.exports[1:]),
    )


def row(shape: Shape, comparison: Comparison) -> str:
    stream = f"{comparison.num_equal} of {comparison.num_tensors}"
    verdict = "" if comparison.is_equal else "FAILED: "
    return (
        f"| {shape.name} | {shape.num_ranks} | {comparison.loss:.0e} | {comparison.grad_norm:.0e} "
        f"| {comparison.logprobs:.0e} | {comparison.weights:.0e} | {verdict}{stream} |"
    )


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max())


def _shapes(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in weights.items()}


def _num_equal(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> int:
    """0 when the names differ."""
    if ours.keys() != theirs.keys():
        return 0
    return sum(ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in theirs)
