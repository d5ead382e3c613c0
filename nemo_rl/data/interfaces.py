"""What a dataset yields."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    prompt: str
    """The user's message, before the chat template."""
    reference: Any
    """What the environment compares a response with."""


@dataclass(frozen=True)
class DatasetSplit:
    train: list[Problem]
    validation: list[Problem]
    """Shares no problem with `train` where the dataset is generated; may be empty."""
