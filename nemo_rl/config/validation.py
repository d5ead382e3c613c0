"""The strict schema applied to plain data: one line per bad key."""

import re
from typing import Any

from nemo_rl.config.errors import ConfigError, did_you_mean, refusal

# pydantic is imported in the functions, so that --help answers at once.

_NOISE = re.compile(r"^(Input|String|List) should (be|have) | after validation, not \d+$")


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
    if kind in ("model_type", "model_attributes_type"):
        return refusal(key, value, f"allowed: {_section_text((*fault['loc'], ''))}")
    if kind in ("bool_type", "bool_parsing"):
        return refusal(key, value, "allowed: true, false")
    if kind == "list_type":
        return refusal(key, value, f"allowed: {_list_text(fault['loc'])}")
    return refusal(key, value, f"allowed: {_NOISE.sub('', fault['msg'])}")


def _section_text(inside: tuple[Any, ...]) -> str:
    """`inside`: the location of any key of it."""
    if inside[:-1] == ("data",):
        return "a section with the key dataset_name and those of its kind"
    return f"a section with the keys {', '.join(_keys_beside(inside))}"


def _list_text(location: tuple[Any, ...]) -> str:
    """What the schema wants in the list at `location`."""
    field = _schema_beside(location)["properties"][location[-1]]
    items = next(option["items"] for option in field.get("anyOf", [field]) if "items" in option)
    return f"a list of {' or '.join(map(repr, items['enum'])) if 'enum' in items else items['type'] + 's'}"


def _drop_union_tags(location: tuple[Any, ...]) -> tuple[Any, ...]:
    """pydantic puts the tag of the `data` union into the path; the YAML has no such level."""
    is_data = len(location) > 1 and location[0] == "data"
    return (location[0], *location[2:]) if is_data else location


def _keys_beside(location: tuple[Any, ...]) -> list[str]:
    """The keys that the schema knows where `location` ends."""
    return list(_schema_beside(location)["properties"])


def _schema_beside(location: tuple[Any, ...]) -> dict[str, Any]:
    """JSON schema of the section that holds the key at `location`."""
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
    schema: dict[str, Any] = node.model_json_schema(by_alias=True)
    return schema
