"""The page of keys is made from the schema, and every key has its sentence."""

from pathlib import Path

from nemo_rl.config.reference import configuration_markdown

PAGE = Path(__file__).parents[3] / "docs/configuration.md"


def test_the_page_is_what_the_schema_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == configuration_markdown(), (
        "python -m nemo_rl.config.reference > docs/configuration.md"
    )


def test_every_key_has_a_meaning() -> None:
    rows = [line for line in configuration_markdown().splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert [row for row in rows if row.endswith("|  |")] == []
