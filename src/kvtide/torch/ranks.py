"""Ballots over torch.distributed: one small all-reduce a tick, on the CPU, beside the step.

    torch.distributed.init_process_group()              # any backend; torchrun sets the rest
    transport = DistributedTransport()
    group = Agreement(kv, transport, Terms(axis="tensor"))

Votes always travel by gloo, also where the model's own collectives use NCCL: they are numbers of
the host, wanted on the host, and must not wait behind kernels.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvtide.errors import RankFailedError, RankLostError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtide.types import IntArray

dist: Any = torch.distributed  # its stubs leave most of what is used here unknown
_torch: Any = torch

_LOOK = 0.2
"""Seconds between two looks for a rank that has stopped, while a tick takes long."""


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
        self._store: Any = dist.PrefixStore(f"{name}/{chosen[0]}/{len(chosen)}", _default_store())
        self._pending: tuple[torch.Tensor, _Work] | None = None
        self._number = 0

    def start(self, words: IntArray) -> None:
        """See `Transport`."""
        if self._pending is not None:
            raise UsageError("a tick is under way; finish it before the next")
        folded: torch.Tensor = _torch.from_numpy(words.copy())
        op = dist.ReduceOp.MIN
        work = _Work(dist.all_reduce(folded, op=op, group=self._group, async_op=True))
        self._pending = folded, work

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
        work = _Work(dist.all_gather(parts, mine, group=self._group, async_op=True))
        self._await(work, seconds)
        return torch.stack(parts).numpy()

    def halt(self, why: str) -> None:
        """See `Transport`: by the store, where the others look while they wait."""
        try:
            self._store.set(f"halt/{self.rank}", why)
            self._store.set("halted", "yes")
        except RuntimeError:
            return  # whoever holds the store is gone: the others notice at their deadline

    def failure(self) -> RankFailedError | None:
        """Why another rank has stopped, if one has said so by `halt`."""
        try:
            for rank in range(self.size):
                if rank != self.rank and self._store.check([f"halt/{rank}"]):
                    why = self._store.get(f"halt/{rank}").decode()
                    return RankFailedError(f"rank {rank} has stopped: {why}")
        except RuntimeError:
            return None  # whoever holds the store is gone
        return None

    def _await(self, work: _Work, seconds: float) -> None:
        number, until = self._number, monotonic() + seconds
        self._number += 1
        while not work.over.wait(min(_LOOK, max(0.0, until - monotonic()))):
            if self._has_halted():
                raise self._lost(number, seconds)
            if monotonic() >= until:
                raise self._lost(number, seconds)
        try:
            work.raise_error()
        except RuntimeError as error:
            raise self._lost(number, seconds) from error

    def _has_halted(self) -> bool:
        try:
            return bool(self._store.check(["halted"]))
        except RuntimeError:
            return True

    def _lost(self, number: int, seconds: float) -> RankLostError | RankFailedError:
        """Why a tick failed: who has said that it stops, else who is not here to say anything."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            self._store.set(f"here/{number}/{self.rank}", "yes")
            if (failure := self.failure()) is not None:
                return failure
            self._store.set("halted", "yes")  # wakes the others, so that they say they are here
            until = monotonic() + 2 * _LOOK
            missing = others
            while missing and monotonic() < until:
                sleep(_LOOK / 4)
                missing = [r for r in missing if not self._store.check([f"here/{number}/{r}"])]
        except RuntimeError:
            missing = []
        return RankLostError.silent(missing, number, seconds)


class _Work:
    """A collective under way; `over` is set when it has ended, well or not."""

    def __init__(self, handle: object) -> None:
        self.over = threading.Event()
        self._handle: Any = handle
        self._handle.get_future().add_done_callback(self._end)

    def _end(self, future: object) -> None:
        del future
        self.over.set()

    def raise_error(self) -> None:
        """RuntimeError if it has failed."""
        self._handle.wait()


def _default_store() -> object:
    """The store that the default process group was made with; torch has no public name for it."""
    return dist.distributed_c10d._get_default_store()
