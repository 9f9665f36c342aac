"""A rank that is killed, or stopped where it stands, in a chosen phase of the protocol."""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from tests.ranks_processes.group import agreement
from tests.ranks_processes.service import Service
from tests.tiny import GRANULE

from kvtide.errors import RanksError
from kvtide.ranks import Change, Quota, agree_quotas
from kvtide.ranks.member import Phase
from kvtide.testing.faults import FaultyMemory
from kvtide.torch.ranks import DistributedTransport

if TYPE_CHECKING:
    from tests.ranks_processes.group import Place

    from kvtide.memory import Memory
    from kvtide.ranks import Agreement

DEADLINE = 3.0

_BEFORE = 3
"""Changes that are made before anybody is lost."""


class DeadlyMemory(FaultyMemory):
    """A memory in which the process ends at a chosen map or unmap, counted from when it is set."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self.ends_at = 0
        self.how = signal.SIGKILL

    def count(self, verb: str) -> None:
        """Steps do no such call here: only changes do."""
        if self.ends_at and verb in ("map", "unmap"):
            self.ends_at -= 1
            if not self.ends_at:
                os.kill(os.getpid(), self.how)


class Doomed:
    """A rank that serves while changes are made; the victim ends in phase `when` of a later one."""

    def __init__(self, place: Place, *, victim: int, when: str, how: str) -> None:
        self.when = when
        self.how = signal.Signals[how]
        self.is_victim = place.rank == victim
        self.memories: list[DeadlyMemory] = []
        self.service = Service(wrap=self._wrap, most=2)
        self.is_ring = when == "draining"
        self.group: Agreement = agreement(
            self.service,
            axis="pipeline" if self.is_ring else "tensor",
            every=4,
            deadline=DEADLINE,
            allow=self._allow,
        )
        start = self.service.pages()
        less = {"full": 20, "window_8": 10, "state": 6}  # two sequences need less than that
        self.splits = itertools.cycle([less, start])
        self.applied = [start]
        self.wanted = start
        self.began = 0.0
        """When the boundary that was not survived began."""

    def _wrap(self, memory: Memory) -> Memory:
        self.memories.append(DeadlyMemory(memory))
        return self.memories[0]

    def _allow(self, change: Change) -> bool:
        """Between hearing of a change and voting on it."""
        del change
        self._end_at("preparing")
        if self._is_due and self.when.startswith("applying"):
            self.memories[0].ends_at = int(self.when.split()[1])
            self.memories[0].how = self.how
        return True

    @property
    def _is_due(self) -> bool:
        return self.is_victim and len(self.applied) > _BEFORE

    def _end_at(self, phase: str) -> None:
        if self._is_due and self.when == phase:
            os.kill(os.getpid(), self.how)

    def serve(self) -> None:
        """Until the group stops."""
        for step in itertools.count():
            self._propose()
            if step % 4 == 0 and not self.group.is_open:
                self._end_at("before the cast")
            self.began = time.monotonic()
            turn = self.group.boundary(self.service.engine.num_in_flight)
            if turn.changed:
                self.applied.append(self.wanted)
            self._end_in_phase()
            ran = not turn.drain and self.service.step(in_flight=self.is_ring)
            if not ran or self.service.engine.num_in_flight > 2:
                self.service.engine.complete()

    def _propose(self) -> None:
        """The other split, as soon as the last was made; in the end none, if it is to be idle."""
        ends_idle = self.when in ("before the cast", "between cast and conclusion")
        if not self.group.is_open and not (ends_idle and len(self.applied) > _BEFORE):
            self.wanted = next(self.splits)
            self.group.propose(Change(pages=self.wanted))

    def _end_in_phase(self) -> None:
        """A ballot may have been cast just now."""
        member = self.group._member
        if member.is_cast and member.phase is Phase.IDLE:
            self._end_at("between cast and conclusion")
        if member.phase is Phase.VOTING:
            self._end_at("voting")
        if member.phase is Phase.DRAINING:
            self._end_at("draining")


def lose(place: Place, *, victim: int, when: str, how: str, store: str = "file") -> dict[str, Any]:
    """Serve until a rank is lost; how that ended here."""
    place.join() if store == "file" else place.join_by_rank_0()
    doomed = Doomed(place, victim=victim, when=when, how=how)
    try:
        doomed.serve()
    except RanksError as error:
        told = _ending(error, doomed.began)
    try:
        doomed.group.boundary()
    except RanksError as error:
        told["same"] = str(error) == told["text"]
    service = doomed.service
    service.audit()
    return {
        **told,
        "pages": service.pages(),
        "applied": doomed.applied,
        "served": service.num_opened,
    }


def lose_at_start(place: Place, *, victim: int, how: str) -> dict[str, Any]:
    """A rank is lost when quotas are about to be agreed on."""
    place.join()
    transport = DistributedTransport()
    if place.rank == victim:
        os.kill(os.getpid(), signal.Signals[how])
    began = time.monotonic()
    try:
        quota = Quota(asked=GRANULE, free=GRANULE)
        agree_quotas(transport, {"gpu": quota}, seconds=DEADLINE)
    except RanksError as error:
        return _ending(error, began)
    return {}


def _ending(error: RanksError, began: float) -> dict[str, Any]:
    seconds = time.monotonic() - began
    return {"error": type(error).__name__, "text": str(error), "seconds": seconds}
