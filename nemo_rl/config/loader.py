"""From the command line to a validated config: YAML with `defaults:`, Hydra overrides, strict schema, support matrix."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from nemo_rl.config.errors import ConfigError, first_line, refusal
from nemo_rl.config.overrides import apply_overrides, merge
from nemo_rl.config.validation import validate

# hydra, omegaconf and pydantic are imported in the functions, so that --help answers at once.

_TAG_ERRORS = (ValueError, LookupError, AttributeError, TypeError, RecursionError)
"""What the constructor of a YAML tag, as in `!!int x`, ends in; and what nests too deep."""

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
    try:
        config = validate(raw)
    except ConfigError as error:
        raise ConfigError([*error.lines, *_unsupported_beside(error, raw)]) from error
    check_support(raw)
    check_consistency(config)
    return config


def _unsupported_beside(schema_error: ConfigError, raw: dict[str, Any]) -> list[str]:
    """The support matrix's lines for keys to which the schema has no objection."""
    from nemo_rl.config.support import check_support

    told = {line.partition(": ")[0] for line in schema_error.lines}
    try:
        check_support(raw)
    except ConfigError as error:
        return [line for line in error.lines if line.partition(": ")[0] not in told]
    return []


def read_yaml(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The merged, resolved, not yet validated mapping; raises ConfigError."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = apply_overrides(_inherit(path, ()), overrides)
    try:
        raw = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError) as error:
        key = error.full_key if isinstance(error, OmegaConfBaseException) else None
        raise ConfigError([refusal(key or str(path), "???", first_line(error))]) from error
    if not isinstance(raw, dict):
        raise ConfigError([refusal(str(path), type(raw).__name__, "a config is a mapping of sections")])
    return {str(key): value for key, value in raw.items()}


def _inherit(path: Path, seen: tuple[Path, ...]) -> Any:
    """The file merged over those that its `defaults:` names."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        path = path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in it, a link to itself
        raise ConfigError([refusal("--config", str(path), f"{error}; needs a readable YAML file")]) from error
    if path in seen:
        raise ConfigError([refusal("defaults", str(path), "a file cannot inherit from itself")])
    own = _load_file(path)
    merged = OmegaConf.create({})
    for parent in _take_parents(own):
        merged = merge(merged, _inherit(path.parent / parent, (*seen, path)))
    try:
        return merge(merged, own)
    except (OmegaConfBaseException, TypeError) as error:
        raise ConfigError([refusal("--config", str(path), first_line(error))]) from error


def _load_file(path: Path) -> Any:
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        own = OmegaConf.load(path)
    except UnicodeDecodeError as error:
        raise ConfigError([refusal("--config", str(path), "not a text file; needs a readable YAML file")]) from error
    except OSError as error:
        reason = error.strerror or "holds no mapping of sections"
        raise ConfigError([refusal("--config", str(path), f"{reason}; needs a readable YAML file")]) from error
    except (yaml.YAMLError, OmegaConfBaseException, *_TAG_ERRORS) as error:
        reason = " ".join(str(error).split()) if isinstance(error, yaml.YAMLError) else first_line(error)
        raise ConfigError([refusal("--config", str(path), f"not YAML of a config: {reason}")]) from error
    if not isinstance(own, DictConfig):
        raise ConfigError([refusal("--config", str(path), "needs a mapping of sections")])
    return own


def _take_parents(own: Any) -> list[str]:
    """Remove `defaults` and return it as a list."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(own, resolve=False)
    if not isinstance(plain, dict) or "defaults" not in plain:
        return []
    parents = plain["defaults"]
    names = [parents] if isinstance(parents, str) else parents
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError([refusal("defaults", parents, "needs the name of a file, or a list of names")])
    del own["defaults"]
    return names


def dump_yaml(config: Any) -> str:
    """The resolved config as YAML."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(by_alias=True)))
