"""The snapshot every viewer reads: frozen facts, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtide.assembly import Parts
    from kvtide.pool import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """One pool, in pages unless the name says bytes. `pages` = free + in flight + used + cached +
    sink.
    """

    name: str
    page_bytes: int
    pages: int
    used: int
    cached: int
    dead: int
    """Of the cached pages, those no match can use any more."""
    free: int
    in_flight: int
    evicted: int
    """Pages dropped from the cache since the start."""
    evicted_for_others: int
    """Of those, the ones dropped so that another pool could have the ground."""
    granules: int
    empty_granules: int
    """Of the granules, those that hold no page that anybody needs or could match."""
    mapped_bytes: int
    stranded_bytes: int
    """Free and dead bytes, if another pool had to evict or refuse in the last steps; else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Facts about one manager at one moment."""

    steps: int
    budget_bytes: int
    unmapped_bytes: int
    """Budget no pool has mapped."""
    sequences: int
    hit_tokens: int
    prompt_tokens: int
    recomputed_tokens: int
    epoch: int
    """Goes up whenever a granule came or went or a page changed places."""
    granules_moved: int
    """Granules that went from one pool to another (or to the system: budget)."""
    granules_moved_by: Mapping[str, int]
    """The same by cause: idle, price, demand, plan, budget."""
    granules_declined: int
    """Granules that dry_run would have begun to move."""
    granules_pending: int
    """Granules that a plan or a smaller budget still asks for."""
    pages_relocated: int
    cached_runs: int
    ghost_blocks: int
    pools: Mapping[str, PoolFacts]


def take_snapshot(parts: Parts) -> Snapshot:
    """Read the facts off the books; changes nothing."""
    dead = parts.prefixes.dead_pages()
    pressed = parts.ground.pressed()
    pools: dict[str, PoolFacts] = {}
    for g, (name, pool) in enumerate(parts.pools.items()):
        books = pool.books
        idle = (books.num_free + dead[g]) * pool.page_bytes
        pools[name] = PoolFacts(
            name=name,
            page_bytes=pool.page_bytes,
            pages=books.num_pages,
            used=books.num_leased,
            cached=books.num_cached,
            dead=dead[g],
            free=books.num_free,
            in_flight=books.num_in_flight,
            evicted=parts.prefixes.eviction.num_evicted[g],
            evicted_for_others=parts.mover.num_yielded[g],
            granules=pool.num_mapped,
            empty_granules=_num_empty(pool),
            mapped_bytes=pool.num_mapped * pool.space.granule_bytes,
            stranded_bytes=idle if pressed - {g} else 0,
        )
    stats, granule = parts.ledger.holdings.stats, parts.memory.granule_bytes
    return Snapshot(
        steps=parts.fences.issued,
        budget_bytes=parts.budget.quota * granule,
        unmapped_bytes=parts.budget.num_free * granule,
        sequences=len(parts.ledger.holdings.live),
        hit_tokens=stats.hit_tokens,
        prompt_tokens=stats.prompt_tokens,
        recomputed_tokens=stats.recomputed_tokens,
        epoch=parts.mover.epoch,
        granules_moved=parts.journal.total,
        granules_moved_by={**parts.journal.num_moved},
        granules_declined=parts.journal.num_declined,
        granules_pending=parts.backlog.pending,
        pages_relocated=parts.mover.num_relocated,
        cached_runs=len(parts.prefixes.tree.nodes()),
        ghost_blocks=parts.prefixes.tree.num_ghost_blocks,
        pools=pools,
    )


def _num_empty(pool: Pool) -> int:
    books, space = pool.books, pool.space
    if books.num_free * pool.page_bytes < space.granule_bytes:
        return 0
    occupied = space.count((books.lease > 0) | (books.owner > 0))
    occupied[: space.granules_for(1)] = 1  # the sink's
    return int(np.count_nonzero(pool.mapped & (occupied == 0)))
