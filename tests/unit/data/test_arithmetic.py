import re
from collections import Counter
from typing import Any

import pytest

from nemo_rl.config.schema import ArithmeticDataConfig
from nemo_rl.data.arithmetic import evaluate, is_held_out
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
    config = make_config(num_train=900, num_validation=100, max_terms=3, min_result=0, operators=["+", "-", "*"])
    split = load_problems(config)
    assert (len(split.train), len(split.validation)) == (900, 100)
    num_terms, num_digits = Counter[int](), Counter[int]()
    for problem in [*split.train, *split.validation]:
        parts = problem.prompt.split()
        num_terms[len(parts) // 2 + 1] += 1
        num_digits.update(map(len, parts[::2]))
        assert all(1 <= int(operand) <= 99 for operand in parts[::2])
        assert set(parts[1::2]) <= {"+", "-", "*"}
        result = eval(problem.prompt)  # the text is made of digits and operators only
        assert problem.reference == str(result)
        assert result >= 0
        assert [int(part) for part in parts[::2]] == sorted(map(int, parts[::2]), reverse=True)
    assert num_terms[2] + num_terms[3] == 1000
    assert 400 < num_terms[2] < 650
    assert 0.4 < num_digits[1] / num_digits.total() < 0.6


def test_validation_is_held_out_and_distinct_whatever_the_seed() -> None:
    trained, validated = set(), set()
    for seed in range(5):
        split = load_problems(make_config(num_train=2000, num_validation=200, seed=seed))
        texts = [problem.prompt for problem in split.validation]
        assert len(set(texts)) == 200
        validated |= set(texts)
        trained |= {problem.prompt for problem in split.train}
    assert not trained & validated
    assert all(is_held_out(text) for text in validated)


def test_negative_results_are_kept_when_asked_for() -> None:
    problems = load_problems(make_config(num_train=500, min_result=None, larger_first=False, operators=["-"])).train
    below = sum(problem.reference.startswith("-") for problem in problems)
    assert 150 < below < 350


def test_same_seed_same_problems() -> None:
    first = load_problems(make_config(num_train=50, num_validation=10))
    assert load_problems(make_config(num_train=50, num_validation=10)) == first
    assert load_problems(make_config(num_train=50, num_validation=10, seed=43)) != first


def test_too_few_problems_for_the_validation_are_refused_with_both_numbers() -> None:
    # 81 sums of two digits, about a third of them held out
    with pytest.raises(
        ValueError, match=r"data.num_validation: got 81; only \d\d distinct held-out problems were found"
    ):
        load_problems(make_config(num_train=10, num_validation=81, max_digits=1, operators=["+"]))


def test_prompt_keeps_other_braces() -> None:
    split = load_problems(make_config(num_train=1, num_validation=0, prompt="{a} {problem} ="))
    assert split.validation == []
    assert re.fullmatch(r"\{a\} \d+ [+-] \d+ =", split.train[0].prompt)
