"""Hydra overrides of the command line, applied to the merged files."""

from collections.abc import Sequence
from typing import Any

from nemo_rl.config.errors import ConfigError, first_line, refusal

# hydra and omegaconf are imported in the functions, so that --help answers at once.


def apply_overrides(config: Any, overrides: Sequence[str]) -> Any:
    """Apply each; one that names the kind of data comes before all others, since it starts that section anew.

    Raises:
        ConfigError: an override is not Hydra's form, a sweep, or does not fit the config.
    """
    parsed = [(text, *_parse(text)) for text in overrides]
    parsed.sort(key=lambda item: item[2] is None or _data_kind(item[2]) is None)
    for text, key, own in parsed:
        config = _delete(config, key) if own is None else _merge_override(config, own, text)
    return config


def merge(base: Any, own: Any) -> Any:
    """A `data` section of another kind starts anew; everything else merges key by key."""
    from omegaconf import OmegaConf

    kind = _data_kind(own)
    if kind is not None and _data_kind(base) != kind:
        base = OmegaConf.masked_copy(base, [key for key in base if key != "data"])
    return OmegaConf.merge(base, own)


def _data_kind(config: Any) -> Any:
    """`data.dataset_name` where it stands as a plain value, else None."""
    from omegaconf import DictConfig, OmegaConf

    if "data" not in config or OmegaConf.is_interpolation(config, "data"):
        return None
    data = config.get("data")
    if not isinstance(data, DictConfig) or OmegaConf.is_interpolation(data, "dataset_name"):
        return None
    return data.get("dataset_name")


def _parse(text: str) -> tuple[str, Any]:
    """The key, and the override as a config of its own; None: delete the key."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    own = OmegaConf.create({})
    try:
        override = OverridesParser.create().parse_override(text)
        key = override.key_or_group
        if override.package is not None:
            raise ConfigError([refusal("override", text, "a package (@) has no meaning here; needs key=value")])
        if not key:
            raise ConfigError([refusal("override", text, "needs Hydra's form key=value")])
        if override.is_sweep_override():
            raise ConfigError([refusal("override", text, "one value per key: a sweep is several runs")])
        if override.is_delete():
            return key, None
        OmegaConf.update(own, key, override.value(), merge=True, force_add=True)
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        reason = first_line(error)
        quotes = "" if text.isascii() else "; other than ASCII needs quotes: 'key=\"value\"'"
        raise ConfigError([refusal("override", text, f"needs Hydra's form key=value{quotes} ({reason})")]) from error
    if _holds_missing(OmegaConf.to_container(own, resolve=False)):
        raise ConfigError([refusal("override", text, "??? stands for no value; needs one")])
    return key, own


def _holds_missing(value: Any) -> bool:
    """Whether ??? stands in it: a merge would leave it out without a word."""
    if isinstance(value, dict | list):
        return any(map(_holds_missing, value.values() if isinstance(value, dict) else value))
    return bool(value == "???")


def _merge_override(config: Any, own: Any, text: str) -> Any:
    from omegaconf.errors import OmegaConfBaseException

    try:
        return merge(config, own)
    except (OmegaConfBaseException, TypeError) as error:
        raise ConfigError([refusal("override", text, first_line(error))]) from error


def _delete(config: Any, key: str) -> Any:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    parent, _, leaf = key.rpartition(".")
    try:
        node = OmegaConf.select(config, parent) if parent else config
        if not isinstance(node, DictConfig) or leaf not in node:
            raise ConfigError([refusal("override", f"~{key}", "no such key to delete")])
        node.pop(leaf)
    except OmegaConfBaseException as error:
        raise ConfigError([refusal("override", f"~{key}", first_line(error))]) from error
    return config
