"""The examples of the page about several ranks run, and end as the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).parents[2] / "docs" / "ranks.md"


def run_block(number: int) -> dict[str, Any]:
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[number]
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_the_example_changes_both_ranks_at_the_same_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = run_block(0)
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert [kv.snapshot().granules_moved_by["plan"] for kv in names["managers"]] == [1, 1]
    for kv in names["managers"]:
        kv.check()


def test_the_example_of_two_nodes_ends_with_equal_quotas(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = run_block(1)
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "[None, None]"
    assert {share.num_bytes for share in names["found"].values()} == {220 << 30}
    assert {share.outcome for share in names["found"].values()} == {"shrink"}
