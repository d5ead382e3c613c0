"""Small pictures to count in or to read, from a seed."""

import random
import zlib
from collections.abc import Callable

from PIL import Image, ImageDraw, ImageFont

from nemo_rl.config.schema import PicturesDataConfig
from nemo_rl.data.image_files import to_png
from nemo_rl.data.interfaces import DatasetSplit, Problem

_HELD_OUT_OF = 3
"""One picture in so many is never trained on, whatever the sizes of the splits: its pixels decide which."""
_MAX_DRAWS_PER_PROBLEM = 20
_GROUNDS = ("white", "lightyellow", "lightcyan", "lavender")
_INKS = ("red", "blue", "green", "black", "purple", "brown")
_CELLS = 3
"""Shapes stand in a grid of so many rows and columns, so that none touches another."""

Drawn = tuple[Image.Image, str, int]
"""Picture, question, answer."""


def load_pictures(config: PicturesDataConfig) -> DatasetSplit:
    """Draw `num_validation` distinct held-out pictures, and `num_train` others, which may repeat; tasks equally often.

    Raises:
        ValueError: too few distinct pictures exist for the validation.
    """
    rng = random.Random(config.seed)
    validation: dict[bytes, Problem] = {}
    train: list[Problem] = []
    for _ in range(_MAX_DRAWS_PER_PROBLEM * (config.num_train + config.num_validation)):
        if len(train) == config.num_train and len(validation) == config.num_validation:
            return DatasetSplit(train=train, validation=list(validation.values()))
        image, question, answer = _TASKS[rng.choice(config.tasks)](config, rng)
        held_out = is_held_out(image)
        if len(validation) == config.num_validation if held_out else len(train) == config.num_train:
            continue
        png = to_png(image)
        problem = Problem(config.prompt.replace("{problem}", question), str(answer), images=(png,))
        if held_out:
            validation[png] = problem
        else:
            train.append(problem)
    raise ValueError(
        f"data.num_validation: got {config.num_validation}; only {len(validation)} distinct held-out pictures were "
        "found; raise data.image_size or ask for fewer"
    )


def is_held_out(image: Image.Image) -> bool:
    """Whether a picture is for validation."""
    return zlib.crc32(image.tobytes()) % _HELD_OUT_OF == 0


def _draw_shapes(config: PicturesDataConfig, rng: random.Random) -> Drawn:
    """1 to `max_shapes` circles or squares of one colour."""
    image, pen, ink = _blank(config, rng)
    kind, count = rng.choice(("circles", "squares")), rng.randint(1, config.max_shapes)
    draw = pen.ellipse if kind == "circles" else pen.rectangle
    cell = config.image_size // _CELLS
    for place in rng.sample(range(_CELLS**2), count):
        size = rng.randint(cell // 2, cell - 2)
        left, top = (cell * index + rng.randint(1, cell - 1 - size) for index in divmod(place, _CELLS))
        draw((left, top, left + size - 1, top + size - 1), fill=ink)
    return image, f"How many {kind} are there?", count


def _draw_digit(config: PicturesDataConfig, rng: random.Random) -> Drawn:
    """One digit, in a font of 5 to 8 tenths of the picture."""
    image, pen, ink = _blank(config, rng)
    digit, size = rng.randint(0, 9), config.image_size
    font = ImageFont.load_default(rng.randint(5 * size // 10, 8 * size // 10))
    left, top, right, bottom = (int(edge) for edge in pen.textbbox((0, 0), str(digit), font=font))
    at = (rng.randint(1, size - 1 - (right - left)) - left, rng.randint(1, size - 1 - (bottom - top)) - top)
    pen.text(at, str(digit), fill=ink, font=font)
    return image, "Which digit is this?", digit


def _blank(config: PicturesDataConfig, rng: random.Random) -> tuple[Image.Image, ImageDraw.ImageDraw, str]:
    """A plain ground, its pen, and a colour to draw in."""
    image = Image.new("RGB", (config.image_size, config.image_size), rng.choice(_GROUNDS))
    return image, ImageDraw.Draw(image), rng.choice(_INKS)


_TASKS: dict[str, Callable[[PicturesDataConfig, random.Random], Drawn]] = {
    "count_shapes": _draw_shapes,
    "read_digit": _draw_digit,
}
