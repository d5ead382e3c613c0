"""How far the engine's probabilities are from the trainer's."""

import torch


def token_mult_prob_error(
    prev_logprobs: torch.Tensor, generation_logprobs: torch.Tensor, token_mask: torch.Tensor
) -> float:
    """Mean over response tokens of exp|trainer log-prob - engine log-prob|; 1 means that both agree.

    Args:
        prev_logprobs, generation_logprobs: `[batch, seq]`, aligned with the input ids.
        token_mask: `[batch, seq]`, not 0 on the tokens that count.

    Raises:
        ValueError: no token is counted.
    """
    mask = token_mask.bool()
    if not mask.any():
        raise ValueError("token_mult_prob_error: the batch has no response tokens")
    # Selected before the exponential: what stands on padding may be anything.
    difference = prev_logprobs[mask].double() - generation_logprobs[mask].double()
    return float(difference.abs().exp().mean())
