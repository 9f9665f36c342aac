"""The example of the page for engine authors runs, with a device that is late."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from kvtide.testing.graphs import TwinDevice
from kvtide.types import SINK

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from kvtide import KVManager

PAGE = Path(__file__).parents[2] / "docs" / "guard.md"


def test_the_example_runs_and_replays_while_granules_move() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    seen: list[list[int]] = []
    managers: list[KVManager] = []

    def record(kv: KVManager, inputs: dict[str, np.ndarray]) -> Callable[[], None]:
        managers.append(kv)

        def replay() -> None:
            for name, table in inputs.items():
                assert kv.pools[name].books.exists[table].all()
            seen.append(inputs["full"][:, 0].tolist())

        return replay

    exec(compile(block, str(PAGE), "exec"), {"device": TwinDevice(), "record": record})
    (kv,) = managers
    assert len(seen) == 100
    for pages in seen:
        assert min(pages) > SINK
        assert len(set(pages)) == 6  # five sequences, and padding three times
    assert kv.moved[0] > 0
