"""JSON lines with a prompt and a reference answer."""

import json
import os
import re
from pathlib import Path
from typing import Any

from nemo_rl.config.schema import ResponseDataConfig
from nemo_rl.data.interfaces import DatasetSplit, Problem

_URL = re.compile(r"data:|[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def load_response_dataset(config: ResponseDataConfig) -> DatasetSplit:
    """Read the files; without `val_data_path` the validation set is empty. Pictures are not opened: `check_pictures`.

    Raises:
        ValueError: a file or a picture is missing, or a line is no JSON object with the keys; names file, line and key.
    """
    columns: set[str] = set()
    train = _read(config, config.train_data_path, "data.train_data_path", columns)
    validation = _read(config, config.val_data_path, "data.val_data_path", columns) if config.val_data_path else []
    if config.image_key is not None and columns and config.image_key not in columns:
        raise ValueError(f"data.image_key: got {config.image_key!r}, which no line has; allowed: {sorted(columns)}")
    return DatasetSplit(train, validation)


def _read(config: ResponseDataConfig, path: str, key: str, columns: set[str]) -> list[Problem]:
    """The problems of a file; `columns` gets the keys of its lines."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError, RuntimeError) as error:  # not text, a NUL in the path, `~` of nobody
        raise ValueError(f"{key}: cannot read {path!r}: {error}") from error
    folder = Path(path).expanduser().absolute().parent
    return [
        _parse(config, line, f"{path}, line {number}", folder, columns)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]


def _parse(config: ResponseDataConfig, line: str, place: str, folder: Path, columns: set[str]) -> Problem:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError also for an integer of too many digits
        raise ValueError(f"{place}: not JSON that can be read ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place}: expected a JSON object, got {type(row).__name__}")
    columns.update(row)
    for option, key in (("input_key", config.input_key), ("output_key", config.output_key)):
        if key not in row:
            raise ValueError(f"{place}: no key {key!r} (data.{option}); the line has {sorted(row)}")
    prompt, reference = row[config.input_key], row[config.output_key]
    if not isinstance(prompt, str):
        raise ValueError(f"{place}: {config.input_key!r} must be a string, got {prompt!r}")
    if isinstance(reference, bool) or not isinstance(reference, str | int | float):
        raise ValueError(f"{place}: {config.output_key!r} must be a string or a number, got {reference!r}")
    _refuse_surrogates(config.input_key, prompt, place)
    _refuse_surrogates(config.output_key, str(reference), place)
    images = (
        () if config.image_key is None else _find_images(config.image_key, row.get(config.image_key), place, folder)
    )
    return Problem(config.prompt.replace("{problem}", prompt), str(reference), images, place)


def _find_images(key: str, value: Any, place: str, folder: Path) -> tuple[Path, ...]:
    names = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{place}: {key!r} must be a path or a list of paths, for none null or [], got {value!r}")
    for name in names:
        if not name:
            raise ValueError(f"{place}: {key!r}: an empty path; for none null or []")
        if _URL.match(name):
            raise ValueError(f"{place}: {key!r}: URLs are not supported: a path is needed, got {name[:60]!r}")
        if not os.path.isfile(folder / name):
            raise ValueError(f"{place}: {key!r}: no file {str(folder / name)!r}")
    return tuple(folder / name for name in names)


def _refuse_surrogates(key: str, text: str, place: str) -> None:
    """JSON can escape half a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: {key!r} holds half a character ({error.reason})") from error
