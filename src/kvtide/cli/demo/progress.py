"""Progress on stderr: bars on a terminal, a line now and then if it is piped."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rich.console import Console

LINES = 4
"""Lines per bar where there is no terminal to draw bars on."""


class Progress:
    """Shows what is going on without getting between the lines of the result."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, message: str) -> None:
        """One line."""
        self._console.print(message, markup=False, highlight=False)

    @contextmanager
    def bar(self, title: str, total: int) -> Generator[Callable[[int], None]]:
        """Count up to `total` requests; call what is yielded with how many more are done."""
        if not self._console.is_terminal:
            yield _Lines(self, title, total).advance
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Bars(*columns, TimeElapsedColumn(), console=self._console) as bars:
            task = bars.add_task(title, total=total)
            yield lambda count: bars.advance(task, count)


class _Lines:
    """A bar as a few lines."""

    def __init__(self, progress: Progress, title: str, total: int) -> None:
        self._progress, self._title, self._total = progress, title, total
        self._done = 0

    def advance(self, count: int) -> None:
        before, self._done = self._done, self._done + count
        if self._done * LINES // self._total > before * LINES // self._total:
            self._progress.say(f"{self._title}: {self._done}/{self._total} requests")
