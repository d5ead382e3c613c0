import random

import numpy as np
import torch

from nemo_rl.utils.seed import seed_everything


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_every_generator_repeats() -> None:
    seed_everything(-5)
    first = draw()
    assert draw() != first
    seed_everything(-5)
    assert draw() == first
