import importlib.util

import pytest

from nemo_rl.config.schema import EnvConfig, ReasoningGymDataConfig
from nemo_rl.data.datasets import load_problems
from nemo_rl.environments.factory import make_environment

INSTALLED = importlib.util.find_spec("reasoning_gym") is not None
CONFIG = ReasoningGymDataConfig(
    dataset_name="reasoning_gym", task="basic_arithmetic", num_train=20, num_validation=5, prompt="Q: {problem}"
)


@pytest.mark.skipif(INSTALLED, reason="the extra reasoning-gym is installed")
def test_without_the_package_the_error_names_the_extra() -> None:
    with pytest.raises(ValueError, match="uv run --extra reasoning-gym"):
        load_problems(CONFIG)


@pytest.mark.skipif(not INSTALLED, reason="needs the extra reasoning-gym")
def test_problems_are_disjoint_and_scored_by_their_task() -> None:
    split = load_problems(CONFIG)
    assert (len(split.train), len(split.validation)) == (20, 5)
    assert len({problem.prompt for problem in [*split.train, *split.validation]}) == 25
    problem = split.train[0]
    assert problem.prompt == f"Q: {problem.reference['question']}"
    environment = make_environment(EnvConfig(), CONFIG)
    answer = problem.reference["answer"]
    responses = [f"so <answer>{answer}</answer>.", f" {answer}\n", "no idea"]
    assert environment.score(responses, [problem.reference] * 3) == [1.0, 1.0, 0.0]


@pytest.mark.skipif(not INSTALLED, reason="needs the extra reasoning-gym")
def test_a_small_task_is_not_padded_with_repetitions() -> None:
    kwargs: dict[str, bool | int | float | str] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config = CONFIG.model_copy(update={"num_train": 2000, "task_kwargs": kwargs})
    split = load_problems(config)
    assert len(split.validation) == 5
    assert len({problem.prompt for problem in split.train}) == len(split.train) < 2000


@pytest.mark.skipif(not INSTALLED, reason="needs the extra reasoning-gym")
def test_unknown_task_and_arguments_are_refused_by_key() -> None:
    with pytest.raises(ValueError, match="data.task: got 'nope'; reasoning-gym has ab, "):
        load_problems(CONFIG.model_copy(update={"task": "nope"}))
    with pytest.raises(ValueError, match="data.task_kwargs: 'basic_arithmetic' refuses"):
        load_problems(CONFIG.model_copy(update={"task_kwargs": {"zzz": 1}}))
