"""From `data.*` to problems."""

from pathlib import Path

from nemo_rl.config.schema import ArithmeticDataConfig, DataConfig, PicturesDataConfig, ReasoningGymDataConfig
from nemo_rl.data.arithmetic import load_arithmetic
from nemo_rl.data.image_files import check_image
from nemo_rl.data.interfaces import DatasetSplit
from nemo_rl.data.pictures import load_pictures
from nemo_rl.data.reasoning_gym_data import load_reasoning_gym
from nemo_rl.data.response_dataset import load_response_dataset


def load_problems(config: DataConfig) -> DatasetSplit:
    """Make or read the problems; the same ones for the same config.

    Raises:
        ValueError: the config cannot be met or a file is wrong; names the key, or the file and line.
    """
    if "{problem}" not in config.prompt:
        raise ValueError(f"data.prompt: got {config.prompt!r}; it must contain {{problem}}")
    if isinstance(config, ArithmeticDataConfig):
        return load_arithmetic(config)
    if isinstance(config, ReasoningGymDataConfig):
        return load_reasoning_gym(config)
    if isinstance(config, PicturesDataConfig):
        return load_pictures(config)
    return load_response_dataset(config)


def check_pictures(problems: DatasetSplit) -> None:
    """Open every file that is a picture. Raises ValueError for one that cannot be read, with the problem's place."""
    for problem in (*problems.train, *problems.validation):
        for image in problem.images:
            if isinstance(image, Path):
                try:
                    check_image(image)
                except ValueError as error:
                    raise ValueError(f"{problem.place}: {error}") from error
