"""Rewards of the package `reasoning-gym`."""

import re
from typing import Any

from nemo_rl.environments.interfaces import EnvironmentInterface

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymEnvironment(EnvironmentInterface):
    """Scores by the task's own `score_answer`, 0 to 1.

    The answer is the last `<answer>...</answer>` of the response, or else the whole response without outer blanks.
    """

    def __init__(self, task: Any) -> None:
        self._task = task

    def score(self, responses: list[str], references: list[Any]) -> list[float]:
        return [
            float(self._task.score_answer(answer=extract_answer(response), entry=entry))
            for response, entry in zip(responses, references, strict=True)
        ]


def extract_answer(response: str) -> str:
    tagged = _ANSWER.findall(response)
    return str(tagged[-1] if tagged else response).strip()
