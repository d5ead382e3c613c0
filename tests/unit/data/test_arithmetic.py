import re
from collections import Counter
from typing import Any

import pytest

from nemo_rl.config.schema import ArithmeticDataConfig
from nemo_rl.data.arithmetic import evaluate
from nemo_rl.data.datasets import load_problems


def make_config(**settings: Any) -> ArithmeticDataConfig:
    return ArithmeticDataConfig(dataset_name="arithmetic", **{"prompt": "{problem}", **settings})


@pytest.mark.parametrize(
    ("operands", "operators", "result"),
    [
        ([23, 60], ["-"], -37),
        ([2, 3, 4], ["+", "*"], 14),
        ([2, 3, 4], ["*", "+"], 10),
        ([2, 3, 4], ["-", "*"], -10),
        ([2, 3, 4], ["*", "*"], 24),
        ([9, 3, 4], ["-", "-"], 2),
    ],
)
def test_evaluate(operands: list[int], operators: list[str], result: int) -> None:
    assert evaluate(operands, operators) == result


def test_problems_are_what_was_asked_for() -> None:
    config = make_config(num_train=300, num_validation=100, max_terms=3, max_operand=20, operators=["+", "-", "*"])
    split = load_problems(config)
    assert (len(split.train), len(split.validation)) == (300, 100)
    problems = [*split.train, *split.validation]
    assert len({problem.prompt for problem in problems}) == 400
    num_terms = Counter(len(problem.prompt.split()) // 2 + 1 for problem in problems)
    assert num_terms == {2: 200, 3: 200}
    for problem in problems:
        parts = problem.prompt.split()
        operands = [int(part) for part in parts[::2]]
        assert all(1 <= operand <= 20 for operand in operands)
        assert set(parts[1::2]) <= {"+", "-", "*"}
        assert problem.reference == str(eval(problem.prompt))  # the text is made of digits and operators only


def test_same_seed_same_problems() -> None:
    first = load_problems(make_config(num_train=50, num_validation=10))
    assert load_problems(make_config(num_train=50, num_validation=10)) == first
    assert load_problems(make_config(num_train=50, num_validation=10, seed=43)) != first


def test_the_whole_space_can_be_used_and_no_more() -> None:
    # 3 * 3 * 2 problems of two terms and 3 * 3 * 3 * 4 of three
    split = load_problems(make_config(num_train=100, num_validation=26, max_terms=3, max_operand=3))
    assert len({problem.prompt for problem in [*split.train, *split.validation]}) == 126
    with pytest.raises(
        ValueError, match=r"100 \+ 27 = 127, but only 126 distinct problems exist; raise data.max_operand"
    ):
        load_problems(make_config(num_train=100, num_validation=27, max_terms=3, max_operand=3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_terms": 3, "max_terms": 2}, "data.min_terms: got 3, above data.max_terms: 2"),
        ({"operators": ["+", "+"]}, "data.operators"),
        ({"prompt": "how much?"}, r"data.prompt: got 'how much\?'; it must contain {problem}"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_problems(make_config(num_train=10, num_validation=2, **settings))


def test_prompt_keeps_other_braces() -> None:
    split = load_problems(make_config(num_train=1, num_validation=0, prompt="{a} {problem} ="))
    assert split.validation == []
    assert re.fullmatch(r"\{a\} \d+ [+-] \d+ =", split.train[0].prompt)
