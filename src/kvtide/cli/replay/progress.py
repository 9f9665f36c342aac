"""A bar on stderr for work that takes long; nothing where nobody watches."""

from __future__ import annotations

from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rich.console import Console

PATIENCE = 2.0
"""Seconds that pass before a bar appears."""


@contextmanager
def bar(
    console: Console, title: str, total: int | None, *, patience: float = PATIENCE
) -> Generator[Callable[[int], None]]:
    """Call what is yielded with how many are done by now; `total` None where nobody knows."""
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bars = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    task = bars.add_task(title, total=total)
    later = Timer(patience, bars.start)
    later.daemon = True
    later.start()
    try:
        yield lambda count: bars.update(task, completed=count)
    finally:
        later.cancel()
        later.join()  # a bar that is just starting has to be there to be stopped
        bars.stop()
