"""Integer arithmetic of two or three terms, from a seed."""

import random
import zlib

from nemo_rl.config.schema import ArithmeticDataConfig
from nemo_rl.data.interfaces import DatasetSplit, Problem

_HELD_OUT_OF = 3
"""One problem in so many is never trained on, whatever the sizes of the splits: which one is decided by its text."""
_MAX_DRAWS_PER_PROBLEM = 100


def load_arithmetic(config: ArithmeticDataConfig) -> DatasetSplit:
    """Draw `num_validation` distinct held-out problems, and `num_train` others, which may repeat.

    Each operand has `min_digits` to `max_digits` digits, equally often, and is at least 1. References are the decimal
    strings of the results, with `*` before `+` and `-`.

    Raises:
        ValueError: too few distinct problems exist for the validation.
    """
    rng = random.Random(config.seed)
    validation: dict[str, int] = {}
    train: list[tuple[str, int]] = []
    for _ in range(_MAX_DRAWS_PER_PROBLEM * (config.num_train + config.num_validation)):
        text, result = _draw(config, rng)
        if config.min_result is not None and result < config.min_result:
            continue
        if not is_held_out(text):
            train.append((text, result))
        elif len(validation) < config.num_validation:
            validation[text] = result
        if len(train) >= config.num_train and len(validation) == config.num_validation:
            break
    else:
        raise ValueError(
            f"data.num_validation: got {config.num_validation}; only {len(validation)} distinct held-out problems were "
            f"found beside {len(train)} to train on; raise data.max_digits or data.max_terms, lower data.min_result, or "
            "ask for fewer"
        )
    return DatasetSplit(
        train=[_problem(config, *item) for item in train[: config.num_train]],
        validation=[_problem(config, *item) for item in validation.items()],
    )


def is_held_out(text: str) -> bool:
    """Whether a problem such as `3 + 41` is for validation."""
    return zlib.crc32(text.encode()) % _HELD_OUT_OF == 0


def evaluate(operands: list[int], operators: list[str]) -> int:
    """`operands[0] operators[0] operands[1] ...`, products first."""
    total, term = 0, operands[0]
    for operator, operand in zip(operators, operands[1:], strict=True):
        if operator == "*":
            term *= operand
        else:
            total, term = total + term, operand if operator == "+" else -operand
    return total + term


def _draw(config: ArithmeticDataConfig, rng: random.Random) -> tuple[str, int]:
    operands = [
        _draw_operand(rng.randint(config.min_digits, config.max_digits), rng)
        for _ in range(rng.randint(config.min_terms, config.max_terms))
    ]
    if config.larger_first:
        operands.sort(reverse=True)
    operators = [rng.choice(config.operators) for _ in operands[1:]]
    text = str(operands[0]) + "".join(f" {o} {n}" for o, n in zip(operators, operands[1:], strict=True))
    return text, evaluate(operands, list(operators))


def _draw_operand(num_digits: int, rng: random.Random) -> int:
    return rng.randint(10 ** (num_digits - 1), 10**num_digits - 1)


def _problem(config: ArithmeticDataConfig, text: str, result: int) -> Problem:
    return Problem(prompt=config.prompt.replace("{problem}", text), reference=str(result))
