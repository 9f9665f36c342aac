"""docs/replay.md shows what benchmarks/replay measured."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmarks" / "replay"


def test_the_tables_are_those_of_the_benchmark() -> None:
    run = runpy.run_path(str(BENCHMARK / "run.py"))
    done = run["read"](BENCHMARK / "result.json")
    assert run["summary"](done) in (ROOT / "docs" / "replay.md").read_text()
    assert run["table"](done).strip() in (BENCHMARK / "README.md").read_text()
