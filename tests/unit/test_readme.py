"""The README's code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs_and_generates_twenty_tokens() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    seen: list[dict[str, object]] = []

    def model(rows: dict[str, object]) -> int:
        seen.append(rows)
        return 7

    names: dict[str, object] = {"model": model}
    exec(compile(block, str(README), "exec"), names)
    assert len(seen) == 20
    assert all(set(rows) == {"window_512", "full"} for rows in seen)
