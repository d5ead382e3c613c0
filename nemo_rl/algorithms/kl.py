"""Estimates of KL(policy || reference) from sampled tokens."""

from typing import Literal

import torch

MAX_LOG_RATIO = 20.0
"""exp(20) is 5e8: no ratio of interest is larger, and no float32 sum overflows."""


def estimate_kl(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, kind: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """Per token, with d = log p - log p_reference of the sampled token (Schulman, "Approximating KL divergence", 2020):

    k1 = d;  k2 = d**2 / 2;  k3 = exp(-d) - 1 + d

    Their mean over samples estimates the KL, but the gradient of that mean alone does not: the samples, too, depend on
    the policy, and k1's gradient is 0 on average. The loss therefore multiplies by the ratio p / p_prev with its gradient
    (and by the engine's importance weight): for k1 and k3 it then has the true gradient, d * grad log p on average
    (DeepSeek-V3.2, arXiv:2512.02556, section 3.1).

    Args:
        logprobs: `[batch, seq]`, with gradient.
        reference_logprobs: `[batch, seq]`.
    """
    difference = (logprobs - reference_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    return torch.expm1(-difference) + difference
