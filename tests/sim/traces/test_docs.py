"""docs/traces.md: its code runs, and its tables say what the code does."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvtide.sim.traces import FORMATS, PUBLIC, open_trace
from kvtide.sim.traces.opening import _FORMATS, Part
from kvtide.sim.traces.settings import names_of
from kvtide.sim.traces.synthetic import Phase, SyntheticOptions

PAGE = (Path(__file__).parents[3] / "docs" / "traces.md").read_text()


def cells(pattern: str) -> list[list[str]]:
    """The cells of every row of a table that begins with `pattern`."""
    rows = re.findall(rf"^\| {pattern} \|.*$", PAGE, re.MULTILINE)
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def defaults(kind: type[Any]) -> dict[str, float]:
    return {field.name: float(field.default) for field in fields(kind)}


def test_code_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "traces.md", "exec"), names)
    assert names["found"].requests == 500


def test_the_own_format_of_the_page_reads(tmp_path: Path) -> None:
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "t.jsonl").write_text(text)
    trace = open_trace(str(tmp_path / "t.jsonl"))
    assert [(one.arrival, one.tenant) for one in trace] == [(0.0, 0), (0.25, 1)]
    assert trace.tenants == ("chat", "code")


def test_every_option_of_the_generator_has_its_row_and_default() -> None:
    part = PAGE[PAGE.index("## The generator") :]
    rows = re.findall(r"^\| `([a-z_]+)` \| ([\d.inf]+) \|", part, re.MULTILINE)
    assert {name: float(value) for name, value in rows} == {
        **defaults(SyntheticOptions),
        **defaults(Phase),
    }


def test_every_option_of_a_format_has_its_row_and_default() -> None:
    rows = re.findall(r"^\| `([a-z]+)` \| `([a-z]+)` \| ([\d.inf]+) \|", PAGE, re.MULTILINE)
    found = {(kind, name): float(value) for kind, name, value in rows}
    assert found == {
        (kind, name): value
        for kind, reader in _FORMATS.items()
        for name, value in defaults(reader.options).items()
    }
    assert all(f"`{name}`" in PAGE for name in names_of(Part))


def test_every_format_and_source_has_its_row() -> None:
    formats = PAGE[PAGE.index("## Formats") : PAGE.index("### Options of formats")]
    rows = re.findall(r"^\| `([a-z]+)` \|", formats, re.MULTILINE)
    assert {*rows, "synthetic"} == set(FORMATS)
    for public in PUBLIC:
        assert public.source.url in PAGE
        assert f"| `{public.format}` | {public.source.licence} |" in PAGE


def test_the_generator_is_as_the_table_says() -> None:
    ((_, requests, inputs, outputs, cv, shared, blocks),) = cells("`synthetic:[^`]*`")
    found = open_trace("synthetic:requests=12031,block=512").describe()
    assert f"{found.requests:,}" == requests
    assert f"{found.input.mean:,.0f}" == inputs
    assert f"{found.output.mean:.0f}" == outputs
    assert f"{found.arrival_cv:.2f}" == cv
    assert (f"{found.shared:.1%}", f"{found.shared_blocks:.1%}") == (
        shared.replace(" ", ""),
        blocks.replace(" ", ""),
    )
