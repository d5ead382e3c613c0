"""Text that a command writes into a document, between two marks that stay there."""

import re
from collections.abc import Sequence
from pathlib import Path


def write_between(document: Path, begin: str, end: str, lines: Sequence[str]) -> None:
    """Replace what stands between the marks."""
    text, count = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}",
        lambda _: "\n".join([begin, "", *lines, "", end]),
        document.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    assert count == 1, f"{document} lacks {begin} or {end}"
    document.write_text(text, encoding="utf-8")
