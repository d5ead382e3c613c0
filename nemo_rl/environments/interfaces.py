"""What scores a response."""

from abc import ABC, abstractmethod
from typing import Any


class EnvironmentInterface(ABC):
    @abstractmethod
    def score(self, responses: list[str], references: list[Any]) -> list[float]:
        """One reward in [0, 1] per response; `references[i]` is what the dataset keeps for that prompt."""
