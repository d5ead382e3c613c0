"""What the repository says of itself."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path.relative_to(ROOT) for path in (ROOT / "nemo_rl").rglob("*.py") if path.name != "__init__.py")
LEVELS = {
    "config": 0, "utils": 0, "distributed": 1, "data": 2, "environments": 2, "models": 2,
    "weight_sync": 3, "experience": 3, "algorithms": 4, "setup": 5, "run": 5,
}  # fmt: skip


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name for name in names if name.startswith("nemo_rl.")}


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_go_down_only(path: Path) -> None:
    own = path.with_suffix("").parts
    for name in imports_of(path):
        parts = name.split(".")
        assert LEVELS[parts[1]] <= LEVELS[own[1]], f"{path} imports {name}"
        if own[1:3] == ("models", "policy"):
            assert parts[1:3] != ["models", "generation"], f"{path} imports {name}"
        if own[1:3] == ("models", "generation"):
            assert parts[1:3] != ["models", "policy"], f"{path} imports {name}"


def test_the_readme_has_a_line_for_every_file() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [str(path) for path in SOURCES if not re.search(rf"^  {re.escape(path.name)} ", readme, re.MULTILINE)] == []


def test_no_registry_host_and_no_lock_file_is_committed() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert "uv.lock" not in tracked
    assert "registry" not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
