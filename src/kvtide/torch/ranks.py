"""Ballots over torch.distributed: one small all-reduce a tick, on the CPU, beside the step.

    torch.distributed.init_process_group()              # any backend; torchrun sets the rest
    transport = DistributedTransport()
    group = Agreement(kv, transport, Terms(axis="tensor"))

Votes always travel by gloo, also where the model's own collectives use NCCL: they are numbers of
the host, wanted on the host, and must not wait behind kernels.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from itertools import count
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch

from kvtide.errors import RankFailedError, RankLostError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtide.types import IntArray

T = TypeVar("T")

dist: Any = torch.distributed  # its stubs leave most of what is used here unknown
_torch: Any = torch

_LOOK = 0.2
"""Seconds between two looks for a rank that has stopped, while a tick takes long."""

_LEAST = 0.001
"""Seconds that torch waits at least: it counts milliseconds, and takes none for no limit."""

_PATIENCE = 3.0
"""Seconds beyond the deadline for finding out, by the store, who is lost."""

_made = count()
"""Numbers the transports of this process, and so of the world: all make them in the same order."""


class DistributedTransport:
    """One rank's end of a group of processes; see `kvtide.ranks.Transport`.

    Must be made on all ranks of the world in the same order, as `torch.distributed.new_group`
    demands, also by those not among `ranks` (default: all). `timeout` seconds bound what gloo
    itself waits for; it should be longer than the deadline of the agreement. Names of lost ranks
    come from the store that the process group was made with.
    """

    def __init__(
        self, ranks: Sequence[int] | None = None, *, name: str = "kvtide", timeout: float = 60.0
    ) -> None:
        if not dist.is_initialized():
            raise UsageError("call torch.distributed.init_process_group() first")
        chosen = list(range(dist.get_world_size())) if ranks is None else sorted(ranks)
        self._group = dist.new_group(chosen, timeout=timedelta(seconds=timeout), backend="gloo")
        self.size = len(chosen)
        self.rank = chosen.index(dist.get_rank()) if dist.get_rank() in chosen else -1
        # A place of its own: what another group, or an earlier one, has left is not for this one.
        self._store: Any = dist.PrefixStore(f"{name}/{next(_made)}", _default_store())
        self._board = _Board()
        self._pending: tuple[torch.Tensor, _Work] | None = None
        self._number = 0

    def start(self, words: IntArray) -> None:
        """See `Transport`."""
        if self._pending is not None:
            raise UsageError("a tick is under way; finish it before the next")
        folded: torch.Tensor = _torch.from_numpy(words.copy())
        op = dist.ReduceOp.MIN
        self._pending = folded, dist.all_reduce(folded, op=op, group=self._group, async_op=True)

    def finish(self, seconds: float) -> IntArray:
        """See `Transport`."""
        if self._pending is None:
            raise UsageError("no tick is under way; start one first")
        (folded, work), self._pending = self._pending, None
        self._await(work, seconds)
        return folded.numpy()

    def gather(self, words: IntArray, seconds: float) -> IntArray:
        """See `Transport`."""
        mine: torch.Tensor = _torch.from_numpy(np.ascontiguousarray(words))
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        self._await(dist.all_gather(parts, mine, group=self._group, async_op=True), seconds)
        return torch.stack(parts).numpy()

    def halt(self, why: str) -> None:
        """See `Transport`: by the store, where the others look while they wait."""

        def tell() -> None:
            self._store.set(f"halt/{self.rank}", why)
            self._store.set("halted", "yes")

        # Is whoever holds the store gone, the others notice at their deadline.
        self._board.ask(tell, 5 * _LOOK, otherwise=None)

    def failure(self) -> RankFailedError | None:
        """Why another rank has stopped, if one has said so by `halt`; waits a second for it."""
        return self._board.ask(self._find_failure, 5 * _LOOK, otherwise=None)

    def _find_failure(self) -> RankFailedError | None:
        for rank in range(self.size):
            if rank != self.rank and self._store.check([f"halt/{rank}"]):
                why = self._store.get(f"halt/{rank}").decode()
                return RankFailedError(f"rank {rank} has stopped: {why}")
        return None

    def _await(self, work: _Work, seconds: float) -> None:
        number, until = self._number, monotonic() + seconds
        self._number += 1
        is_over = False
        while True:
            left = until - monotonic()
            try:
                work.wait(timedelta(seconds=max(_LEAST, min(_LOOK, left))))
            except RuntimeError as error:  # it has failed, or is only not over yet
                if is_over or left <= _LEAST:
                    raise self._lost(number, seconds) from error
                is_over = work.is_completed()  # then wait again, which says how it ended
                if not is_over and self._has_halted(left):
                    raise self._lost(number, seconds) from error
            else:
                return

    def _has_halted(self, seconds: float) -> bool:
        def look() -> bool:
            try:
                return bool(self._store.check(["halted"]))
            except RuntimeError:
                return True  # whoever held the store is gone

        return self._board.ask(look, min(_LOOK, seconds), otherwise=False)

    def _lost(self, number: int, seconds: float) -> RankLostError | RankFailedError:
        """Why a tick failed: who has said that it stops, else who is not here to say anything."""
        return self._board.ask(
            lambda: self._find_lost(number, seconds),
            _PATIENCE,
            otherwise=RankLostError.silent([], number, seconds),
        )

    def _find_lost(self, number: int, seconds: float) -> RankLostError | RankFailedError:
        missing = [rank for rank in range(self.size) if rank != self.rank]
        self._store.set(f"here/{number}/{self.rank}", "yes")
        if (failure := self._find_failure()) is not None:
            return failure
        self._store.set("halted", "yes")  # wakes the others, so that they say they are here
        until = monotonic() + 5 * _LOOK
        while missing and monotonic() < until:
            sleep(_LOOK / 4)
            missing = [r for r in missing if not self._store.check([f"here/{number}/{r}"])]
        return RankLostError.silent(missing, number, seconds)


class _Work(Protocol):
    """A collective under way, as torch.distributed hands it out."""

    def wait(self, timeout: timedelta) -> bool: ...
    def is_completed(self) -> bool: ...


class _Board:
    """Asks the store in a thread, one question at a time: its holder may stand still, too, and then
    a call takes minutes.
    """

    def __init__(self) -> None:
        self._asking: threading.Thread | None = None

    def ask(self, question: Callable[[], T], seconds: float, *, otherwise: T) -> T:
        """The answer; `otherwise` if the store fails, or does not answer in time."""
        if self._asking is not None:
            self._asking.join(seconds)
            if self._asking.is_alive():
                return otherwise
        answers: list[T] = []

        def run() -> None:
            with suppress(RuntimeError):
                answers.append(question())

        self._asking = threading.Thread(target=run, name="kvtide-ranks-store", daemon=True)
        self._asking.start()
        self._asking.join(seconds)
        return answers[0] if answers else otherwise


def _default_store() -> object:
    """The store that the default process group was made with; torch has no public name for it."""
    return dist.distributed_c10d._get_default_store()
