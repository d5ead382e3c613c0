import math

import pytest
import torch

from nemo_rl.algorithms.mismatch import token_mult_prob_error


def test_exact_over_response_tokens_only() -> None:
    prev = torch.tensor([[0.0, -1.0, -2.0, 99.0], [0.0, -1.0, math.nan, -math.inf]])
    engine = torch.tensor([[5.0, -1.5, -1.5, 0.0], [7.0, -1.0, 0.0, 0.0]])
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    assert token_mult_prob_error(prev, engine, mask) == pytest.approx((2 * math.exp(0.5) + 1) / 3)


def test_equal_sides_give_one() -> None:
    logprobs = torch.tensor([[0.0, -3.0]])
    assert token_mult_prob_error(logprobs, logprobs, torch.tensor([[0, 1]])) == 1.0


def test_no_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="no response tokens"):
        token_mult_prob_error(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2))
