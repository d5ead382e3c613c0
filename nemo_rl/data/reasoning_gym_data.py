"""Tasks of the package `reasoning-gym`, an optional extra: imported only when a run asks for it."""

import importlib
import importlib.util
import logging
from typing import Any

from nemo_rl.config.schema import ReasoningGymDataConfig
from nemo_rl.data.interfaces import DatasetSplit, Problem

logger = logging.getLogger(__name__)


def load_reasoning_gym(config: ReasoningGymDataConfig) -> DatasetSplit:
    """Draw `num_validation` distinct problems, then up to `num_train` others; references are the package's entries.

    The package draws with repetition, so a small task may yield fewer training problems; the count is logged.

    Raises:
        ValueError: the package is not installed, or it does not know the task or its arguments.
    """
    validation: dict[str, Problem] = {}
    train: dict[str, Problem] = {}
    for entry in make_task(config):
        question = entry["question"]
        if question in validation or question in train:
            continue
        split = validation if len(validation) < config.num_validation else train
        split[question] = Problem(prompt=config.prompt.replace("{problem}", question), reference=entry)
    if len(train) < config.num_train or len(validation) < config.num_validation:
        logger.warning(
            "reasoning_gym task %s: %d distinct training and %d validation problems, of %d and %d asked for",
            config.task, len(train), len(validation), config.num_train, config.num_validation,
        )  # fmt: skip
    return DatasetSplit(train=list(train.values()), validation=list(validation.values()))


def make_task(config: ReasoningGymDataConfig) -> Any:
    """The package's dataset object: an iterable of entries, with `score_answer(answer, entry)`."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError(
            "data.dataset_name: 'reasoning_gym' needs the package reasoning-gym; run with `uv run --extra reasoning-gym`"
        )
    factory = importlib.import_module("reasoning_gym.factory")
    known = sorted(factory.DATASETS)
    if config.task not in known:
        raise ValueError(f"data.task: got {config.task!r}; reasoning-gym has {', '.join(known)}")
    size = config.num_train + config.num_validation
    try:
        return factory.create_dataset(config.task, seed=config.seed, size=size, **config.task_kwargs)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"data.task_kwargs: {config.task!r} refuses {config.task_kwargs}: {error}") from error
