"""A safetensors checkpoint on disk, seen without loading it: headers, and whether a policy can take it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from nemo_rl.config.schema import LoRAConfig
from nemo_rl.distributed.weight_transfer.manifest import listed
from nemo_rl.models.model_source import find_model_class, read_config
from nemo_rl.models.policy.conversions import group_tensors
from nemo_rl.models.policy.export_plan import Headers, make_export_plan
from nemo_rl.models.policy.lora import add_adapters
from nemo_rl.models.policy.tensor_parallel import check_tensor_parallel

_KEY = "policy.model_name"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_IGNORED = "consolidated"
"""Files of another format that engines leave out, too."""


def read_headers(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Names, shapes and dtypes; no weight is read.

    Raises:
        ValueError: the files are not all there, not readable, or trainer and engine would choose different ones.
    """
    headers = {}
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 it is no mapping
                    piece = opened.get_slice(name)
                    headers[name] = (tuple(piece.get_shape()), str(piece.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{_KEY}: {file} cannot be read ({error})") from error
    return headers


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    others = {path.name for path in folder.glob("*.safetensors") if not path.name.startswith(_IGNORED)}
    if not index.is_file():
        if others != {_SINGLE}:
            raise ValueError(f"{_KEY}: {folder} holds {sorted(others)} and no {_INDEX}; allowed: {_SINGLE} alone")
        return [folder / _SINGLE]
    try:
        chosen = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{_KEY}: {index} is no index of weights ({error!r})") from error
    if absent := sorted(chosen - others):
        raise ValueError(f"{_KEY}: {index} names files that are not there: {listed(absent)}")
    if _SINGLE in others - chosen:
        # transformers would read the one, engines the other.
        raise ValueError(f"{_KEY}: {folder} holds both {_SINGLE} and {_INDEX}, which does not name it; remove one")
    return [folder / name for name in sorted(chosen)]


def check_checkpoint(
    folder: Path, dtype: torch.dtype, *, lora: LoRAConfig | None = None, tensor_parallel_size: int = 1
) -> None:
    """Do on meta, in a second and without reading weights, what the trainer ranks will do with the folder.

    Raises:
        ValueError: weights that are absent or do not fit, or that could not be sent as the folder has them; adapters that
            the model has no place for; by name. Or a model that so many ranks cannot share.
    """
    headers = read_headers(folder)
    model, info = _load_on_meta(folder, dtype)
    check_loaded(folder, info)
    check_ties(folder, model, headers)
    make_export_plan(model, headers, dtype)
    if tensor_parallel_size > 1:
        check_tensor_parallel(model, tensor_parallel_size)
    if lora is not None:
        add_adapters(model, lora)


class _EqualOnMeta(TorchFunctionMode):
    """Some versions of transformers compare tied weights while loading; on meta they have no values to differ in."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.equal and all(tensor.is_meta for tensor in args):
            return True
        return func(*args, **(kwargs or {}))


def _load_on_meta(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    model_class: Any = find_model_class(read_config(folder))
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # the table that loading prints is in the errors of `check_loaded`
    transformers_logging.disable_progress_bar()

    def load() -> tuple[PreTrainedModel, dict[str, Any]]:
        with _EqualOnMeta():
            loaded: tuple[PreTrainedModel, dict[str, Any]] = model_class.from_pretrained(
                folder, dtype=dtype, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True
            )
        return loaded

    try:
        return load()
    except RuntimeError:
        # A conversion failed: transformers says which tensors in its table alone, and that on a second time.
        transformers_logging.set_verbosity(verbosity)
        try:
            return load()
        except RuntimeError as error:
            raise ValueError(f"{_KEY}: cannot load {folder}, see the table above: {_one_line(error)}") from error
    except Exception as error:
        raise ValueError(f"{_KEY}: cannot load {folder} ({type(error).__name__}: {_one_line(error)})") from error
    finally:
        transformers_logging.set_verbosity(verbosity)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def check_loaded(folder: Path, info: Mapping[str, Any]) -> None:
    """Raise ValueError when transformers has filled in weights of its own."""
    absent = [str(name) for name in sorted(info["missing_keys"])]
    misfit = [f"{name} {list(held)} instead of {list(asked)}" for name, held, asked in sorted(info["mismatched_keys"])]
    if absent or misfit:
        raise ValueError(
            f"{_KEY}: {folder} lacks weights or has them in another shape than the model: {listed([*absent, *misfit])}"
        )


def check_ties(folder: Path, model: PreTrainedModel, headers: Headers) -> None:
    """Raise ValueError when the config ties weights that differ on disk: engines believe the config."""
    for pair in model.all_tied_weights_keys.items():
        names = [group_tensors(model, [name])[0].target for name in pair]
        if all(name in headers for name in names) and not torch.equal(*(_read(folder, name) for name in names)):
            raise ValueError(
                f"{_KEY}: config.json ties {names[0]} to {names[1]}, and {folder} holds different values for them; "
                "set tie_word_embeddings to what the weights are"
            )


def _read(folder: Path, name: str) -> torch.Tensor:
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            if name in opened.keys():  # noqa: SIM118 it is no mapping
                tensor: torch.Tensor = opened.get_tensor(name)
                return tensor
    raise AssertionError(f"{folder} holds no {name}")
