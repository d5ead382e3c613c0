import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from nemo_rl.config.schema import ResponseDataConfig
from nemo_rl.data.datasets import check_pictures, load_problems
from nemo_rl.data.interfaces import Problem


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def make_config(train: str, **settings: Any) -> ResponseDataConfig:
    return ResponseDataConfig(dataset_name="ResponseDataset", train_data_path=train, **settings)


def test_reads_both_files(tmp_path: Path) -> None:
    train = write(
        tmp_path / "train.jsonl",
        json.dumps({"q": "a < {b} \u2028 é", "a": "7"}, ensure_ascii=False),
        "",
        json.dumps({"q": "", "a": 8, "more": None}),
    )
    val = write(tmp_path / "val.jsonl", json.dumps({"q": "x", "a": 0.5}))
    config = make_config(train, val_data_path=val, input_key="q", output_key="a", prompt="Q: {problem}")
    split = load_problems(config)
    assert split.train == [Problem("Q: a < {b} \u2028 é", "7"), Problem("Q: ", "8")]
    assert split.validation == [Problem("Q: x", "0.5")]


def test_no_validation_file_no_validation(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", '{"input": "x", "output": "1"}')
    assert load_problems(make_config(train)).validation == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "x"}', r"line 2: no key 'output' \(data.output_key\); the line has \['input'\]"),
        ('{"output": "x"}', r"line 2: no key 'input' \(data.input_key\)"),
        ('{"input": "x", ', "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON that can be read .*recursion"),
        ('{"input": "x", "output": ' + "1" * 5000 + "}", "line 2: not JSON that can be read .*4300 digits"),
        ('{"input": "\\ud800", "output": "x"}', "line 2: 'input' holds half a character"),
        ('{"input": "x", "output": "\\ud800"}', "line 2: 'output' holds half a character"),
        ('["x"]', "line 2: expected a JSON object, got list"),
        ('{"input": 3, "output": "x"}', "line 2: 'input' must be a string, got 3"),
        ('{"input": "x", "output": null}', "line 2: 'output' must be a string or a number, got None"),
        ('{"input": "x", "output": true}', "line 2: 'output' must be a string or a number, got True"),
    ],
)
def test_errors_name_file_line_and_key(tmp_path: Path, line: str, message: str) -> None:
    train = write(tmp_path / "train.jsonl", '{"input": "x", "output": "1"}', line)
    with pytest.raises(ValueError, match=f"train.jsonl, {message}"):
        load_problems(make_config(train))


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text('{"input": "x", "output": "1"}', encoding="utf-8-sig")
    assert load_problems(make_config(str(train))).train == [Problem("x", "1")]


def test_pictures_are_found_from_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    paths = [tmp_path / "images/a.png", tmp_path / "b.jpg"]
    for path in paths:
        Image.new("RGB", (8, 8)).save(path)
    rows = ["images/a.png", ["b.jpg", str(paths[0])], [], None]
    lines = [json.dumps({"input": "x", "output": "1", "image": row}) for row in rows]
    lines.append('{"input": "x", "output": "1"}')
    train = write(tmp_path / "train.jsonl", *lines)
    problems = load_problems(make_config(train, image_key="image")).train
    assert [problem.images for problem in problems] == [(paths[0],), (paths[1], paths[0]), (), (), ()]
    assert problems[4].place == f"{train}, line 5"
    assert load_problems(make_config(train)).train[0].images == ()


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("a.png", r"'image': no file '.*/a.png'"),
        (["b.png", "text.png"], r"'.*/text.png' is no picture that can be read"),
        ("cut.png", r"'.*/cut.png' is no picture that can be read"),
        ("cut.jpg", r"'.*/cut.jpg' is no picture that can be read \(image file is truncated"),
        (".", "'image': no file '.*'"),
        ("a\0b", "'image': no file '.*'"),
        ("", r"'image': an empty path; for none null or \[\]"),
        (["b.png", ""], r"'image': an empty path; for none null or \[\]"),
        ("https://a.b/c.png", "'image': URLs are not supported: a path is needed, got 'https://a.b/c.png'"),
        ("file:///c.png", "'image': URLs are not supported: a path is needed, got 'file:///c.png'"),
        ("data:image/png;base64," + "A" * 999, "'image': URLs are not supported: a path is needed, got '.{60}'$"),
        (3, r"'image' must be a path or a list of paths, for none null or \[\], got 3"),
        ([["b.png"]], r"'image' must be a path or a list of paths, for none null or \[\], got "),
        ([None], r"'image' must be a path or a list of paths, for none null or \[\], got "),
    ],
)
def test_what_is_no_picture_is_refused_with_file_and_line(tmp_path: Path, image: Any, message: str) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "b.png")
    (tmp_path / "text.png").write_text("no picture")
    Image.effect_noise((64, 64), 90).save(tmp_path / "b.jpg")
    for kind in ("png", "jpg"):
        (tmp_path / f"cut.{kind}").write_bytes((tmp_path / f"b.{kind}").read_bytes()[:-20])
    lines = [json.dumps({"input": "x", "output": "1", "image": name}) for name in ("b.png", image)]
    train = write(tmp_path / "train.jsonl", *lines)
    with pytest.raises(ValueError, match=f"train.jsonl, line 2: {message}"):
        check_pictures(load_problems(make_config(train, image_key="image")))


def test_a_picture_key_that_no_line_has_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    train = write(
        tmp_path / "train.jsonl", '{"input": "x", "output": "1"}', '{"input": "", "output": "1", "img": null}'
    )
    says = r"^data.image_key: got 'image', which no line has; allowed: \['img', 'input', 'output'\]$"
    with pytest.raises(ValueError, match=says):
        load_problems(make_config(train, image_key="image"))
    assert load_problems(make_config(train, image_key="img")).train[1].images == ()


@pytest.mark.parametrize("path", ["a\0b", "~no-such-user/x"])
def test_a_path_that_cannot_be_names_the_key(path: str) -> None:
    with pytest.raises(ValueError, match="data.train_data_path: cannot read"):
        load_problems(make_config(path))


def test_missing_file_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data.train_data_path: cannot read"):
        load_problems(make_config(str(tmp_path / "none.jsonl")))
    train = write(tmp_path / "train.jsonl", '{"input": "x", "output": "1"}')
    with pytest.raises(ValueError, match="data.val_data_path: cannot read"):
        load_problems(make_config(train, val_data_path=str(tmp_path)))
