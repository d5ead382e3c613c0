"""One seed for every generator of a process."""

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (every device). `seed` may be any integer; NumPy takes it modulo 2**32."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
