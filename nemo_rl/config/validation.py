"""The strict schema applied to plain data: one line per bad key."""

from typing import Any

from nemo_rl.config.errors import ConfigError, did_you_mean, refusal

# pydantic is imported in the functions, so that --help answers at once.


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
