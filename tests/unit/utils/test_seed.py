import random

import numpy as np
import pytest
import torch

from nemo_rl.utils.seed import seed_everything


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_every_generator_repeats(seed: int) -> None:
    seed_everything(seed)
    first = draw()
    assert draw() != first
    seed_everything(seed)
    assert draw() == first
