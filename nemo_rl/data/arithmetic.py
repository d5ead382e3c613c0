"""Integer arithmetic of two or three terms, from a seed.

Problems are drawn without repetition by drawing indices: every problem of n terms has a number below
`max_operand**n * num_operators**(n - 1)`, and is spelt out of its digits. So distinctness costs no retries.
"""

import random

from nemo_rl.config.schema import ArithmeticDataConfig
from nemo_rl.data.interfaces import DatasetSplit, Problem


def load_arithmetic(config: ArithmeticDataConfig) -> DatasetSplit:
    """Draw `num_train + num_validation` distinct problems, as many of each number of terms as the space allows.

    Operands are 1 to `max_operand`; references are the decimal strings of the results, with `*` before `+` and `-`.

    Raises:
        ValueError: fewer distinct problems exist than are asked for, or the keys contradict each other.
    """
    _check(config)
    rng = random.Random(config.seed)
    problems = []
    for num_terms, count in _shares(config).items():
        for index in rng.sample(range(_space(config, num_terms)), count):
            problems.append(_problem(config, num_terms, index))
    rng.shuffle(problems)
    return DatasetSplit(train=problems[config.num_validation :], validation=problems[: config.num_validation])


def evaluate(operands: list[int], operators: list[str]) -> int:
    """`operands[0] operators[0] operands[1] ...`, products first."""
    total, term = 0, operands[0]
    for operator, operand in zip(operators, operands[1:], strict=True):
        if operator == "*":
            term *= operand
        else:
            total, term = total + term, operand if operator == "+" else -operand
    return total + term


def _check(config: ArithmeticDataConfig) -> None:
    if config.min_terms > config.max_terms:
        raise ValueError(f"data.min_terms: got {config.min_terms}, above data.max_terms: {config.max_terms}")
    if len(set(config.operators)) < len(config.operators):
        raise ValueError(f"data.operators: got {config.operators}; each may stand there once")
    wanted = config.num_train + config.num_validation
    available = sum(_space(config, n) for n in range(config.min_terms, config.max_terms + 1))
    if wanted > available:
        raise ValueError(
            f"data.num_train + data.num_validation: got {config.num_train} + {config.num_validation} = {wanted}, but "
            f"only {available} distinct problems exist; raise data.max_operand or data.max_terms, or ask for fewer"
        )


def _space(config: ArithmeticDataConfig, num_terms: int) -> int:
    return int(config.max_operand**num_terms * len(config.operators) ** (num_terms - 1))


def _shares(config: ArithmeticDataConfig) -> dict[int, int]:
    """Number of terms -> number of problems. A small space gives all it has; the next larger one makes up for it."""
    missing = config.num_train + config.num_validation
    shares = {}
    for num_terms in range(config.min_terms, config.max_terms + 1):
        num_kinds_left = config.max_terms - num_terms + 1
        shares[num_terms] = min(_space(config, num_terms), -(-missing // num_kinds_left))
        missing -= shares[num_terms]
    return shares


def _problem(config: ArithmeticDataConfig, num_terms: int, index: int) -> Problem:
    operands, operators = [], []
    for position in range(num_terms):
        index, digit = divmod(index, config.max_operand)
        operands.append(digit + 1)
        if position:
            index, digit = divmod(index, len(config.operators))
            operators.append(config.operators[digit])
    text = str(operands[0]) + "".join(f" {o} {n}" for o, n in zip(operators, operands[1:], strict=True))
    return Problem(prompt=config.prompt.replace("{problem}", text), reference=str(evaluate(operands, list(operators))))
