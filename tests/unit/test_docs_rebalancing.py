"""The example of the page for operators runs, and its options and causes exist."""

from __future__ import annotations

import re
from pathlib import Path

from kvtide import KVManager, Options
from kvtide.rebalance import Journal

PAGE = Path(__file__).parents[2] / "docs" / "rebalancing.md"
TEXT = PAGE.read_text()


def test_the_example_runs() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    moves = names["moves"]
    assert isinstance(moves, list)
    assert {event.cause for event in moves if hasattr(event, "cause")} >= {"plan", "budget"}
    kv = names["kv"]
    assert isinstance(kv, KVManager)
    assert kv.snapshot().budget_bytes == 768 << 20
    kv.check()


def test_all_causes_and_capacity_options_are_explained() -> None:
    for cause in Journal([], None).num_moved:
        assert f"`{cause}`" in TEXT
    named = [name for name in Options.__slots__ if "move" in name or name.endswith("_pages")]
    assert len(named) == 4
    for name in [*named, "mode", "pool_ratio", "budget_bytes"]:
        assert f"`{name}`" in TEXT or f"Options.{name}" in TEXT
