"""What a dataset yields."""

from dataclasses import dataclass, field
from typing import Any

from nemo_rl.data.image_files import ImageSource


@dataclass(frozen=True)
class Problem:
    prompt: str
    """The user's message, before the chat template."""
    reference: Any
    """What the environment compares a response with."""
    images: tuple[ImageSource, ...] = ()
    """Pictures, which the user's message begins with."""
    place: str = field(default="data", compare=False)
    """Where it comes from, for messages: file and line."""


@dataclass(frozen=True)
class DatasetSplit:
    train: list[Problem]
    validation: list[Problem]
    """Shares no problem with `train` where the dataset is generated; may be empty."""
