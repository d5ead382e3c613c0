"""One seed for every generator of a process."""

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (every device). `seed` is 0 to 2**32 - 1, NumPy's range."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
