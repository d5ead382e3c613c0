"""What scores a response."""

from abc import ABC, abstractmethod
from typing import Any


class EnvironmentInterface(ABC):
    def check_references(self, references: list[Any]) -> None:
        """Called once at set-up; raises ValueError, with the key, where `score` could not use a reference."""
        return

    @abstractmethod
    def score(self, responses: list[str], references: list[Any]) -> list[float]:
        """One reward in [0, 1] per response; `references[i]` is what the dataset keeps for that prompt."""
