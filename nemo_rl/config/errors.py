"""The one error of a bad config."""

import difflib
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """Bad input, found before anything expensive starts: one line per key, `key: got value; what is allowed`."""

    def __init__(self, lines: Iterable[str]):
        self.lines = tuple(lines)
        super().__init__("\n".join(self.lines))


def yaml_text(value: Any) -> str:
    """A scalar as YAML and Hydra write it; strings quoted."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def refusal(key: str, value: Any, allowed: str) -> str:
    shown = yaml_text(value)
    return f"{key}: got {shown if len(shown) <= 80 else shown[:77] + '...'}; {allowed}"


def first_line(error: Exception) -> str:
    """The reason alone; hydra and omegaconf put their own context into further lines."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if len(line) <= 200 else line[:197] + "..."


_PEFT_NAMES = {"r": "dim", "rank": "dim", "lora_alpha": "alpha"}
"""What other programs call a key of ours, and no spelling leads to."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Names the closest of `known`, or all of them."""
    names = sorted(known)
    if _PEFT_NAMES.get(word) in names:
        return f"did you mean {_PEFT_NAMES[word]!r}?"
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    return f"did you mean {close[0]!r}?" if close else f"allowed here: {', '.join(names)}"
