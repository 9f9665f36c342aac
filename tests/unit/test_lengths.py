"""Files and functions stay short: 400 and 50 lines. Ruff holds everything else."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCES = sorted((Path(__file__).parents[2] / "src" / "kvtide").rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
AIM_MEDIAN_LINES = 8


def functions(path: Path) -> dict[str, int]:
    """Lines of each function of a file, from `def` to the last line, docstring included."""
    nodes = ast.walk(ast.parse(path.read_text()))
    found = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {f"{n.name}:{n.lineno}": (n.end_lineno or n.lineno) - n.lineno + 1 for n in found}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.parts[-2:]))
def test_file_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    assert {k: n for k, n in functions(path).items() if n > MAX_FUNCTION_LINES} == {}


def test_median_function_is_reported(record_property: Callable[[str, object], None]) -> None:
    lines = [n for path in SOURCES for n in functions(path).values()]
    record_property("median_function_lines", statistics.median(lines))
    print(f"median function: {statistics.median(lines)} lines, aim {AIM_MEDIAN_LINES}")
