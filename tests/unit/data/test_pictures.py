import io
from typing import Any

import pytest
from PIL import Image

from nemo_rl.config.schema import PicturesDataConfig
from nemo_rl.data import pictures
from nemo_rl.data.datasets import load_problems
from nemo_rl.data.interfaces import Problem
from nemo_rl.data.pictures import is_held_out


def make_config(**settings: Any) -> PicturesDataConfig:
    return PicturesDataConfig(dataset_name="pictures", **{"num_train": 60, "num_validation": 20, **settings})


def open_picture(problem: Problem) -> Image.Image:
    (png,) = problem.images
    assert isinstance(png, bytes)
    return Image.open(io.BytesIO(png))


def count_islands(image: Image.Image) -> int:
    """Connected regions of what is not ground, by flooding one after the other."""
    width, height = image.size
    ground = image.getpixel((0, 0))
    left = {(x, y) for x in range(width) for y in range(height) if image.getpixel((x, y)) != ground}
    islands = 0
    while left:
        islands, edge = islands + 1, [left.pop()]
        while edge:
            x, y = edge.pop()
            near = {(x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)} & left
            left -= near
            edge += near
    return islands


@pytest.mark.parametrize("size", [28, 56, 97])
def test_as_many_shapes_are_drawn_as_the_reference_says(size: int) -> None:
    split = load_problems(make_config(tasks=["count_shapes"], image_size=size, max_shapes=9))
    for problem in [*split.train, *split.validation]:
        image = open_picture(problem)
        assert image.size == (size, size)
        assert len(image.getcolors() or ()) == 2
        assert str(count_islands(image)) == problem.reference
    assert {problem.reference for problem in split.train} == set("123456789")
    assert {problem.prompt.split()[2] for problem in split.train} == {"circles", "squares"}


def test_digits_are_drawn_inside_the_picture_and_differ() -> None:
    split = load_problems(make_config(tasks=["read_digit"], prompt="Q: {problem}"))
    assert {problem.reference for problem in split.train} == set("0123456789")
    for problem in split.train:
        image = open_picture(problem)
        assert problem.prompt == "Q: Which digit is this?"
        ground = image.getpixel((0, 0))
        assert all(image.getpixel((x, y)) == ground for x in range(56) for y in (0, 55))
        assert count_islands(image) == 1


def test_pictures_for_validation_are_distinct_and_never_trained_on_whatever_the_seed() -> None:
    trained, validated = set(), set()
    for seed in range(3):
        split = load_problems(make_config(seed=seed))
        assert (len(split.train), len(split.validation)) == (60, 20)
        assert len({problem.images for problem in split.validation}) == 20
        assert all(is_held_out(open_picture(problem)) for problem in split.validation)
        trained |= {problem.images for problem in split.train}
        validated |= {problem.images for problem in split.validation}
    assert not trained & validated
    assert load_problems(make_config(seed=2)) == split


def test_too_few_pictures_for_the_validation_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_MAX_DRAWS_PER_PROBLEM", 2)
    config = make_config(num_train=1, num_validation=200)
    with pytest.raises(ValueError, match=r"data.num_validation: got 200; only \d+ distinct held-out pictures"):
        load_problems(config)
