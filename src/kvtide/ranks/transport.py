"""How ballots travel. `kvtide.torch.ranks` has the one for processes."""

from __future__ import annotations

import threading
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvtide.errors import RankFailedError, RankLostError
from kvtide.ranks.ballot import fold

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide.types import IntArray


class Transport(Protocol):
    """Carries one rank's words to the others of its group.

    `start` and `finish` are called in turn, once a tick, by every rank; in between the step runs.
    """

    rank: int
    size: int

    def start(self, words: IntArray) -> None:
        """Begin to fold `words` (int64, as long on every rank) with those of all ranks."""
        ...

    def finish(self, seconds: float) -> IntArray:
        """The fold by minimum of what all ranks started. Raises RanksError if that takes longer."""
        ...

    def gather(self, words: IntArray, seconds: float) -> IntArray:
        """Every rank's `words`, int64 [size, words]. Raises RanksError if that takes longer."""
        ...

    def halt(self, why: str) -> None:
        """This rank stops: let the others know at once, if they can still be reached."""
        ...


class LocalHub:
    """A group in one process: a thread each, or all ranks in turn from one thread.

    In turn works because every rank starts a tick before any finishes it. `lose(rank)` makes a rank
    silent, as if it had died.
    """

    def __init__(self, size: int) -> None:
        self._news = threading.Condition()
        self.size = size
        self._sent: dict[int, dict[int, IntArray]] = {}
        self._taken: dict[int, int] = {}
        self._halted: dict[int, str] = {}
        self._lost: set[int] = set()
        self.num_folds = 0
        """Folds begun, by whom it may be."""

    def ranks(self) -> list[LocalTransport]:
        """One transport for each rank."""
        return [LocalTransport(self, rank, self.size) for rank in range(self.size)]

    def lose(self, rank: int) -> None:
        """Nothing that `rank` sends from now on arrives."""
        self._lost.add(rank)

    def send(self, rank: int, number: int, words: IntArray) -> None:
        """`rank`'s words of the group's `number`-th exchange."""
        with self._news:
            self.num_folds += number not in self._sent
            sent = self._sent.setdefault(number, {})
            if rank not in self._lost:
                sent[rank] = words
            self._news.notify_all()

    def await_all(self, rank: int, number: int, seconds: float) -> list[IntArray]:
        """The words of all ranks at an exchange, in their order."""
        until = monotonic() + seconds
        with self._news:
            while True:
                sent = self._sent.get(number, {})
                if len(sent) == self.size:
                    self._forget(number)
                    return [sent[r] for r in range(self.size)]
                for other, why in self._halted.items():
                    if other != rank:
                        raise RankFailedError(f"rank {other} has stopped: {why}")
                if not self._news.wait(max(0.0, until - monotonic())):
                    missing = [r for r in range(self.size) if r not in sent]
                    raise RankLostError.silent(missing, number, seconds)

    def _forget(self, number: int) -> None:
        """One more rank has taken an exchange: the last one takes it away."""
        self._taken[number] = self._taken.get(number, 0) + 1
        if self._taken[number] == self.size:
            del self._sent[number], self._taken[number]

    def halt(self, rank: int, why: str) -> None:
        """`rank` stops."""
        with self._news:
            if rank not in self._lost:
                self._halted.setdefault(rank, why)
            self._news.notify_all()


class LocalTransport:
    """One rank's end of a `LocalHub`."""

    def __init__(self, hub: LocalHub, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._hub = hub
        self._number = 0

    def start(self, words: IntArray) -> None:
        """See `Transport`."""
        self._hub.send(self.rank, self._number, words.copy())

    def finish(self, seconds: float) -> IntArray:
        """See `Transport`."""
        return fold(self._await(seconds))

    def gather(self, words: IntArray, seconds: float) -> IntArray:
        """See `Transport`."""
        self.start(words)
        return np.stack(self._await(seconds))

    def halt(self, why: str) -> None:
        """See `Transport`."""
        self._hub.halt(self.rank, why)

    def _await(self, seconds: float) -> list[IntArray]:
        number = self._number
        self._number += 1
        return self._hub.await_all(self.rank, number, seconds)


def side_by_side(
    hub: LocalHub, work: Callable[[LocalTransport], None]
) -> list[BaseException | None]:
    """Run `work` on every rank at once, in threads; what each raised, by rank."""
    raised: list[BaseException | None] = [None] * hub.size

    def run(transport: LocalTransport) -> None:
        try:
            work(transport)
        except BaseException as error:  # noqa: BLE001 - the caller looks at it
            raised[transport.rank] = error

    threads = [threading.Thread(target=run, args=(t,), daemon=True) for t in hub.ranks()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised
