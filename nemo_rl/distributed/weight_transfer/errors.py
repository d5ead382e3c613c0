"""How a refit fails."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TransferFacts:
    """What is known of a failed refit besides its text."""

    engine: str | None = None
    """The one that failed first, where one did."""
    bucket: int | None = None
    """Index of the bucket under way."""
    tensors: tuple[str, str] | None = None
    """First and last of that bucket."""
    engine_text: str | None = None
    """The engine's own words."""
    engines_failed: tuple[str, ...] = ()
    """Not to be used again as they are: they failed, were silent, or may hold a part of the new weights."""
    partly_updated: bool = False
    """Whether `engines_failed` may hold a part of the new weights: all of them, once any bucket was announced."""


class TransferError(RuntimeError):
    """A refit that failed. Survives pickling, so it crosses Ray whole."""

    def __init__(self, what: str, facts: TransferFacts = TransferFacts()) -> None:
        super().__init__(what, facts)
        self.what = what
        self.facts = facts

    @property
    def engines_failed(self) -> tuple[str, ...]:
        return self.facts.engines_failed

    @property
    def partly_updated(self) -> bool:
        return self.facts.partly_updated

    @property
    def what_to_do(self) -> str:
        """Empty where every engine is as it was."""
        if not self.engines_failed:
            return ""
        engines = ", ".join(self.engines_failed)
        if self.partly_updated:
            return (
                f"these may hold a part of the new weights, replace them or send all of it before they serve: {engines}"
            )
        return f"no weight was sent; replace {engines}"

    def touching(self, announced: Sequence[str]) -> "TransferError":
        """The same failure, after a bucket has been announced to these engines."""
        if not announced:
            return self
        return TransferError(self.what, replace(self.facts, engines_failed=tuple(announced), partly_updated=True))

    def __str__(self) -> str:
        return f"{self.what}; {self.what_to_do}" if self.what_to_do else self.what


class ManifestError(TransferError):
    """What is sent differs from what was planned: names the tensors."""
