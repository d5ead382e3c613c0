"""docs/configuration.md, made from the schema: `python -m nemo_rl.config.reference > docs/configuration.md`."""

import json
import sys
from collections.abc import Iterator
from typing import Any

from nemo_rl.config.schema import MasterConfig

HEADER = """\
# Configuration

A run is one YAML file. `defaults: other.yaml` in it inherits from a file beside it; `key=value` on the command line
overrides, in [Hydra's grammar](https://hydra.cc/docs/advanced/override_grammar/basic/). An unknown key, a wrong type or
a value out of range ends the program with exit code 2 and one line per fault, before anything starts. Switching
`data.dataset_name` drops all inherited `data.*` keys.

Environment: `NRL_CACHE` (where built models are kept; default `~/.cache/nemo_rl`), `NRL_REFIT_BUFFER_MEMORY_RATIO` (part
of the free memory that a refit bucket may take, at most 2 GiB; default 0.3), `RAY_ADDRESS` (a Ray cluster to join).

This page is made from the schema: `python -m nemo_rl.config.reference > docs/configuration.md`.

| key | default | allowed | meaning |
|---|---|---|---|
"""


Schema = dict[str, Any]

_BOUNDS = (
    ("minimum", ">="),
    ("exclusiveMinimum", ">"),
    ("maximum", "<="),
    ("exclusiveMaximum", "<"),
    ("minLength", "of length >="),
)


def configuration_markdown() -> str:
    schema = MasterConfig.model_json_schema(by_alias=True)
    rows = _rows(schema, "", schema["$defs"])
    return HEADER + "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)


def _rows(section: Schema, prefix: str, definitions: Schema) -> Iterator[tuple[str, str, str, str]]:
    for name, field in section["properties"].items():
        key, required = f"{prefix}{name}", name in section.get("required", ())
        if "discriminator" in field:
            for tag, reference in field["discriminator"]["mapping"].items():
                yield from _rows(_follow(reference, definitions), f"{key} ({tag}).", definitions)
            continue
        default = "required" if required else f"`{json.dumps(field.get('default'))}`"
        options = field.get("anyOf", [field])
        nested = [_follow(option["$ref"], definitions) for option in options if "$ref" in option]
        if not nested or default == "`null`":
            allowed = " or ".join("a section" if "$ref" in option else _allowed(option) for option in options)
            yield f"`{key}`", default, allowed, " ".join(field.get("description", "").split())
        for inner in nested:
            yield from _rows(inner, f"{key}.", definitions)


def _follow(reference: str, definitions: Schema) -> Schema:
    section: Schema = definitions[reference.rsplit("/", 1)[-1]]
    return section


def _allowed(field: Schema) -> str:
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field["type"] == "array":
        return f"list of {_allowed(field['items'])}"
    bounds = [f"{symbol} {field[name]:.15g}" for name, symbol in _BOUNDS if name in field]
    return " ".join([field["type"], *bounds])


if __name__ == "__main__":
    sys.stdout.write(configuration_markdown())
