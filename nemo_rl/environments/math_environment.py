"""Reward 1 for a right answer, 0 for a wrong one."""

from collections.abc import Callable
from typing import Any, Literal

from nemo_rl.environments.interfaces import EnvironmentInterface
from nemo_rl.environments.verifiers import last_integer, math_verify, parse_reference

_VERIFIERS: dict[str, Callable[[str, str], bool]] = {"last_integer": last_integer, "math_verify": math_verify}


class MathEnvironment(EnvironmentInterface):
    def __init__(self, verifier: Literal["last_integer", "math_verify"]) -> None:
        self._name = verifier
        self._verify = _VERIFIERS[verifier]

    def check_references(self, references: list[Any]) -> None:
        if self._name == "last_integer":
            for reference in references:
                parse_reference(reference)

    def score(self, responses: list[str], references: list[Any]) -> list[float]:
        return [float(self._verify(*pair)) for pair in zip(responses, references, strict=True)]
