"""From the command line to a validated config: YAML with `defaults:`, Hydra overrides, strict schema, support matrix."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from nemo_rl.config.errors import ConfigError, did_you_mean, refusal

# hydra, omegaconf and pydantic are imported in the functions, so that --help answers at once.

USAGE = """\
usage: {program} --config FILE.yaml [key=value ...]

  --config FILE.yaml   the run; `defaults: other.yaml` in it inherits from a file beside it
  key=value            Hydra overrides: policy.optimizer.kwargs.lr=1e-5, 'data.operators=[+]', ~policy.scheduler
  --help               this text

Every key with its meaning: docs/configuration.md. A wrong key or value ends with exit code 2 before anything starts.
"""


def load_config_or_exit(argv: Sequence[str], *, program: str) -> Any:
    """The config, or the end of the process: 0 after --help, 2 with one line per fault on standard error."""
    if "--help" in argv or "-h" in argv:
        sys.stdout.write(USAGE.format(program=program))
        raise SystemExit(0)
    try:
        path, overrides = split_arguments(argv)
        return load_config(path, overrides)
    except ConfigError as error:
        exit_with_refusal(error)


def exit_with_refusal(error: ValueError) -> NoReturn:
    sys.stderr.write(f"{error}\n")
    raise SystemExit(2)


def split_arguments(argv: Sequence[str]) -> tuple[Path, list[str]]:
    """`--config FILE` or `--config=FILE`, and the overrides around it."""
    path: str | None = None
    overrides: list[str] = []
    rest = iter(argv)
    for argument in rest:
        if argument == "--config":
            path = next(rest, None)
        elif argument.startswith("--config="):
            path = argument.removeprefix("--config=")
        elif argument.startswith("-"):
            raise ConfigError([refusal("command line", argument, "allowed: --config FILE, --help, key=value")])
        else:
            overrides.append(argument)
    if not path:
        raise ConfigError(
            [refusal("--config", path, "needs a YAML file, as examples/configs/grpo_sglang_broadcast_cpu.yaml")]
        )
    return Path(path), overrides


def load_config(path: Path, overrides: Sequence[str] = ()) -> Any:
    """Load, merge, validate.

    Returns:
        MasterConfig.

    Raises:
        ConfigError: one line per fault.
    """
    from nemo_rl.config.consistency import check_consistency
    from nemo_rl.config.support import check_support

    raw = read_yaml(path, overrides)
    check_support(raw)
    config = validate(raw)
    check_consistency(config)
    return config


def read_yaml(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The merged, resolved, not yet validated mapping."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = _apply_overrides(_inherit(path, ()), overrides)
    try:
        raw = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError([refusal(error.full_key or str(path), "???", str(error.msg).splitlines()[0])]) from error
    if not isinstance(raw, dict):
        raise ConfigError([refusal(str(path), type(raw).__name__, "a config is a mapping of sections")])
    return {str(key): value for key, value in raw.items()}


def _inherit(path: Path, seen: tuple[Path, ...]) -> Any:
    """The file merged over those that its `defaults:` names."""
    import yaml
    from omegaconf import DictConfig, OmegaConf

    path = path.resolve()
    if path in seen:
        raise ConfigError([refusal("defaults", str(path), "a file cannot inherit from itself")])
    try:
        own = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigError([refusal("--config", str(path), f"{reason}; needs a readable YAML file")]) from error
    except yaml.YAMLError as error:
        raise ConfigError([refusal("--config", str(path), f"not YAML: {' '.join(str(error).split())}")]) from error
    if not isinstance(own, DictConfig):
        raise ConfigError([refusal("--config", str(path), "needs a mapping of sections")])
    parents = own.pop("defaults", [])
    merged = OmegaConf.create({})
    for parent in [parents] if isinstance(parents, str) else parents:
        merged = _merge(merged, _inherit(path.parent / str(parent), (*seen, path)))
    return _merge(merged, own)


def _merge(base: Any, own: Any) -> Any:
    """A `data` section of another kind starts anew; everything else merges key by key."""
    from omegaconf import DictConfig, OmegaConf

    data = own.get("data")
    kind = data.get("dataset_name") if isinstance(data, DictConfig) else None
    if kind is not None and "data" in base and base.data.get("dataset_name") != kind:
        base = OmegaConf.masked_copy(base, [key for key in base if key != "data"])
    return OmegaConf.merge(base, own)


def _apply_overrides(config: Any, overrides: Sequence[str]) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
            if override.is_sweep_override():
                raise ConfigError([refusal("override", text, "one value per key: a sweep is several runs")])
            key = override.key_or_group
            if override.is_delete():
                config = _delete(config, key)
            else:
                own = OmegaConf.create({})
                OmegaConf.update(own, key, override.value(), merge=True, force_add=True)
                config = _merge(config, own)
        except (HydraException, OmegaConfBaseException) as error:
            reason = " ".join(str(error).split())
            raise ConfigError([refusal("override", text, f"needs Hydra's form key=value ({reason})")]) from error
    return config


def _delete(config: Any, key: str) -> Any:
    from omegaconf import OmegaConf

    parent, _, leaf = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    if node is None or leaf not in node:
        raise ConfigError([refusal("override", f"~{key}", "no such key to delete")])
    node.pop(leaf)
    return config


def validate(raw: dict[str, Any]) -> Any:
    """Strict schema -> MasterConfig; raises ConfigError with one line per bad key."""
    from pydantic import ValidationError

    from nemo_rl.config.schema import MasterConfig

    try:
        return MasterConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_describe(fault) for fault in error.errors(include_url=False)) from error


def _describe(fault: Any) -> str:
    key = ".".join(str(part) for part in _drop_union_tags(fault["loc"]))
    kind, value, context = fault["type"], fault["input"], fault.get("ctx", {})
    if kind == "extra_forbidden":
        return refusal(key, value, f"unknown key; {did_you_mean(fault['loc'][-1], _keys_beside(fault['loc']))}")
    if kind == "missing":
        return f"{key}: missing; every run must set it"
    if kind == "literal_error":
        return refusal(key, value, f"allowed: {context['expected']}")
    if kind == "union_tag_invalid":
        return refusal(f"{key}.dataset_name", context["tag"], f"allowed: {context['expected_tags']}")
    if kind == "union_tag_not_found":
        return f"{key}.dataset_name: missing; every run must set it"
    message = fault["msg"].removeprefix("Input should be ")
    return refusal(key, value, f"allowed: {message}")


def _drop_union_tags(location: tuple[Any, ...]) -> tuple[Any, ...]:
    """pydantic puts the tag of the `data` union into the path; the YAML has no such level."""
    is_data = len(location) > 1 and location[0] == "data"
    return (location[0], *location[2:]) if is_data else location


def _keys_beside(location: tuple[Any, ...]) -> list[str]:
    """The keys that the schema knows where `location` ends."""
    from typing import get_args

    from nemo_rl.config.schema import DataConfig, MasterConfig, Section

    node: Any = MasterConfig
    if len(location) > 1 and location[0] == "data":
        kinds = get_args(get_args(DataConfig)[0])
        node = next(kind for kind in kinds if location[1] in get_args(kind.model_fields["dataset_name"].annotation))
        location = location[2:]
    for part in location[:-1]:
        field = next(f for name, f in node.model_fields.items() if (f.alias or name) == part)
        options = [field.annotation, *get_args(field.annotation)]
        node = next(o for o in options if isinstance(o, type) and issubclass(o, Section))
    return [field.alias or name for name, field in node.model_fields.items()]


def dump_yaml(config: Any) -> str:
    """The resolved config as YAML."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(by_alias=True)))
