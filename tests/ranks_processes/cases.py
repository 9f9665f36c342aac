"""What ranks do, by name: each function is one rank's part and returns what it tells."""

from __future__ import annotations

import itertools
import random
import time
from typing import TYPE_CHECKING, Any

from tests.ranks_processes.group import Place, agreement, story, turn_to
from tests.ranks_processes.losing import lose, lose_at_start
from tests.ranks_processes.service import FLOORS, Service, hybrid, some_change
from tests.tiny import GRANULE

from kvtide.errors import ConfigError, RanksError
from kvtide.ranks import Change, Quota, agree_pages, agree_quotas, fingerprint_of
from kvtide.testing.faults import FaultyMemory
from kvtide.torch.ranks import DistributedTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide.memory import Memory

Told = dict[str, Any]


def alone(place: Place, *, requests: int) -> Told:
    """The same requests on one rank that changes nothing."""
    del place
    service = Service()
    service.serve(requests)
    return {"finished": service.finished}


def serve(place: Place, *, mode: str, commits: int, every: int = 1, nap: float = 0.0) -> Told:
    """Serve, with another change proposed at every step, until so many were made; then finish.

    The last rank sleeps `nap` seconds in every step.
    """
    place.join()
    service = Service()
    group = agreement(service, mode=mode, every=every)
    rng, under_load = random.Random(7), 0
    for step in itertools.count():
        left = commits - group.facts().commits
        if left <= 0 and not service.is_busy:
            break
        if left > 0 and (mode == "replicated" or group.is_leader):
            group.propose(some_change(rng, service))
        turn = group.boundary()
        under_load += turn.changed and service.is_busy
        service.step(opens=left > 0)
        if nap and place.rank == place.size - 1:
            time.sleep(nap)
        if step % 64 == 0:
            service.audit()
    return {**story(service, group), "under_load": under_load}


# -- starting together ---------------------------------------------------------------------------


def start(place: Place) -> Told:
    """Ranks whose machines have different memory left: settle, build, and serve alike."""
    place.join()
    transport = DistributedTransport(name="start")
    gib = 1 << 30
    asked = {"gpu": Quota(asked=400 * gib, free=(220, 440)[place.rank] * gib)}
    numbers = agree_quotas(transport, asked, node=place.rank)["gpu"]
    free = (34, 60)[place.rank] * GRANULE
    real = {"gpu": Quota(asked=free, free=free)}
    layout = hybrid()
    share = agree_quotas(
        transport, real, fingerprint=fingerprint_of(layout, "tensor"), node=place.rank
    )
    # One rank's memory has granules to spare: what is agreed on holds, not what is there.
    service = Service(granules=free // GRANULE, budget_bytes=share["gpu"].num_bytes)
    before = service.pages()
    pages = agree_pages(transport, before)
    granted = service.kv.resize(pages)
    group = agreement(service)
    refusal = turn_to(group, Change(pages={**pages, "full": pages["full"] - 4}))
    while service.num_opened < 40:
        group.boundary()
        service.step()
    return {
        **story(service, group),
        "gib": numbers.num_bytes / gib,
        "outcome": numbers.outcome,
        "bytes": share["gpu"].num_bytes,
        "agreed": pages,
        "granted": granted,
        "refusal": refusal,
    }


def start_apart(place: Place) -> Told:
    """Rank 1 was given another layout."""
    place.join()
    layout = hybrid(scale=1 + (place.rank == 1))
    quotas = {"gpu": Quota(asked=GRANULE, free=GRANULE)}
    try:
        agree_quotas(
            DistributedTransport(),
            quotas,
            fingerprint=fingerprint_of(layout, "tensor"),
            node=place.rank,
        )
    except (RanksError, ConfigError) as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {}


# -- one rank says no, cannot, or differs --------------------------------------------------------


def refuse(place: Place) -> Told:
    """The last rank's engine says no to the first change, and yes to the second."""
    place.join()
    service = Service()
    said: list[Change] = []

    def allow(change: Change) -> bool:
        said.append(change)
        return place.rank != place.size - 1 or len(said) > 1

    group = agreement(service, allow=allow)
    wanted = {name: count - 1 for name, count in service.pages().items()}
    before = service.pages()
    refusals = [turn_to(group, Change(pages=wanted))]
    kept = service.pages() == before
    refusals.append(turn_to(group, Change(pages=wanted)))
    return {**story(service, group), "refusals": refusals, "kept": kept, "wanted": wanted}


def run_short(place: Place) -> Told:
    """All have agreed, then the last rank's memory refuses."""
    place.join()
    memories: list[FaultyMemory] = []

    def wrap(memory: Memory) -> Memory:
        memories.append(FaultyMemory(memory))
        return memories[0]

    service = Service(wrap=wrap)
    group = agreement(service)
    wanted = {name: count - 1 for name, count in service.pages().items()}
    before = service.pages()

    def provoke() -> None:
        if place.rank == place.size - 1:
            memories[0].fail_at = 1
        turn_to(group, Change(pages=wanted))
        group.boundary()  # the others learn at the next tick

    return {**_stopped(service, group, provoke), "before": before, "wanted": wanted}


def differ(place: Place) -> Told:
    """Rank 1 serves a sequence that the others know nothing of; then all start a group anew."""
    place.join()
    service = Service()
    group = agreement(service)
    ticks: list[int] = []

    def diverge() -> None:
        for step in range(40):
            ticks.append(step)
            group.boundary()
            service.step()
            if step == 20 and place.rank == 1:
                extra = service.kv.open([5] * 3)
                assert service.kv.admit([extra])

    told = {**_stopped(service, group, diverge), "at": ticks[-1]}
    service.kv.shut_down()
    anew = Service()
    refusal = turn_to(agreement(anew), Change(budget_bytes=30 * GRANULE))
    return {**told, "anew": refusal, "digests": anew.digests()}


def restart(place: Place) -> Told:
    """Rank 0 gives up; then the same processes begin again, and rank 1 is slow at a tick."""
    place.join()
    service = Service()
    group = agreement(service)
    told = {"error": ""}
    if place.rank == 0:
        group.halt("told to")
    else:
        told = _stopped(service, group, lambda: (group.boundary(), group.boundary())[0])
    service.kv.shut_down()
    anew = Service()
    again = agreement(anew)
    if place.rank == 1:
        time.sleep(1)  # longer than others wait before they look whether somebody has stopped
    refusal = turn_to(again, Change(budget_bytes=30 * GRANULE))
    return {**told, "anew": refusal, "digests": anew.digests()}


def _stopped(service: Service, group: Any, act: Callable[[], object]) -> Told:
    """What ended the group, how soon, and whether it stays ended."""
    started = time.monotonic()
    try:
        act()
    except RanksError as error:
        seconds = time.monotonic() - started
        try:
            group.boundary()
        except RanksError as again:
            same = str(again) == str(error)
        else:
            same = False
        service.audit()
        return {
            "error": type(error).__name__,
            "text": str(error),
            "seconds": seconds,
            "same": same,
            "pages": service.pages(),
        }
    return {"error": ""}


# -- other axes ----------------------------------------------------------------------------------

SCALES = (1, 2, 3, 5)
"""Bytes of a page on each stage, relative to the first: stages have layers of their own."""


def ring(place: Place, *, changes: int) -> Told:
    """A stage of a pipeline: as many micro-batches as stages, the later ones' fences lag more."""
    place.join()
    transport = DistributedTransport(name="start")
    scale = SCALES[place.rank]
    service = Service(layout=hybrid(scale), granules=34 * scale + 2 * place.rank, lanes=place.size)
    pages = agree_pages(transport, service.pages())
    assert service.kv.resize(pages) == pages
    group = agreement(service, axis="pipeline", mode="leader", every=2)
    rng, made, flying, tables = random.Random(3), 0, [], []
    for step in itertools.count():
        if made >= changes and not service.is_busy:
            break
        if group.is_leader and made < changes and step % 7 == 0:
            group.propose(Change(pages=_other_pages(rng, pages)))
        flying.append(service.engine.num_in_flight)
        turn = group.boundary(flying[-1])
        if turn.changed:
            made += 1
            assert not service.kv.num_in_flight, "a step was in flight while pages were moved"
            tables.append([service.pages(), service.digests()])
        ran = not turn.drain and service.step(
            opens=made < changes, in_flight=True, lane=step % place.size
        )
        if not ran or service.engine.num_in_flight > 1 + place.rank:
            service.engine.complete()
        if step % 32 == 0:
            service.kv.check()
    service.engine.complete(place.size)
    return {**story(service, group), "made": made, "most": max(flying), "tables": tables}


def _other_pages(rng: random.Random, pages: dict[str, int]) -> dict[str, int]:
    """Less for some pools and more for others, for a sequence of the longest always enough."""
    return {name: rng.randrange(FLOORS[name], count + 4) for name, count in pages.items()}


def pause(place: Place) -> Told:
    """Attention data parallel: every rank has traffic and plans of its own."""
    place.join()
    service = Service(seed=place.rank, granules=34 + 8 * place.rank)
    group = agreement(service, axis="attention_data", every=4)
    rng, pauses, applied = random.Random(place.rank), [], []
    for step in range(300):
        if step % (11, 17)[place.rank] == 0:
            group.propose(some_change(rng, service))
        before = group.facts().pauses
        turn = group.boundary()
        if turn.changed:
            applied.append(step)
        if group.facts().pauses > before:
            pauses.append(step)
        has_work = place.rank or step > 100  # rank 0 has none at first
        ran = has_work and not turn.drain and service.step(in_flight=True)
        if not ran or service.engine.num_in_flight > 1:
            service.engine.complete()
        if step % 32 == 0:
            service.kv.check()
    service.engine.complete(2)
    return {"pauses": pauses, "applied": applied, **story(service, group)}


CASES: dict[str, Callable[..., Told]] = {
    case.__name__: case
    for case in (
        alone, serve, start, start_apart, refuse, run_short, differ, restart, ring, pause, lose,
        lose_at_start,
    )
}  # fmt: skip
