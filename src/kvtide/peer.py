"""A manager as one of several that must stay equal: what `kvtide.ranks` needs of it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

if TYPE_CHECKING:
    from kvtide.assembly import Parts
    from kvtide.rebalance import Plan

TURNS = 16
"""Page tables are summed a sixteenth of their rows at a time: a long table costs some time."""


class Peer:
    """Reads what must be equal on all ranks, and holds fences back until all have passed them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    @property
    def digest_names(self) -> tuple[str, ...]:
        """What the numbers of `digest` are."""
        per_pool = ("pages", "free pages", "cached pages", "evicted pages")
        pools = [f"{what} of pool {name!r}" for name in self._parts.pools for what in per_pool]
        return (*pools, "matches and publications", "sequences' lengths", "page tables")

    def digest(self, turn: int = 0) -> tuple[int, ...]:
        """Pages of every pool, the clock of the prefix index, and checksums of all sequences'
        lengths and of every sixteenth row of the page tables, another sixteenth each `turn`.
        """
        parts = self._parts
        numbers: list[int] = []
        evicted = parts.prefixes.eviction.num_evicted
        for pool, gone in zip(parts.pools.values(), evicted, strict=True):
            books = pool.books
            numbers += (books.num_pages, books.num_free, books.num_cached, gone)
        rows = parts.ledger.holdings.rows
        lengths = crc32(rows.computed.tobytes(), crc32(rows.length.tobytes()))
        return (*numbers, parts.prefixes.eviction.clock, lengths, self._sum_tables(turn))

    def _sum_tables(self, turn: int) -> int:
        rows = self._parts.ledger.holdings.rows
        mine = np.arange(turn % TURNS, len(rows.length), TURNS)
        mine = mine[rows.length[mine] > 0]
        found = 0
        for group in self._parts.ledger.holdings.groups:
            width = group.table.rows.shape[1]
            if width > 1 and len(mine):
                width = min(width, int(rows.room[mine].max()) // rows.block_tokens + 1)
            found = crc32(group.table.rows[mine, :width].tobytes(), found)
        return found

    @property
    def num_completed(self) -> int:
        """The last step whose fence has passed on this rank, whether it counts yet or not."""
        return self._parts.fences.reached()

    @property
    def num_in_flight(self) -> int:
        """Steps whose fence has not passed on this rank, whatever counts as completed."""
        return self._parts.fences.issued - self.num_completed

    def count_completed(self, step: int) -> None:
        """From now on completed steps count only up to `step`, which all ranks have reached.

        Pages are given back behind fences, which pass sooner on one rank than on another; with
        this they come free at the same call on all.
        """
        self._parts.fences.horizon = step

    def wishes(self) -> Plan:
        """Trades that `dry_run` would have begun since the last call, as one plan."""
        return self._parts.journal.take_wishes()

    def pages_after(self, plan: Plan) -> dict[str, int]:
        """Pages each pool would have, the sinks apart, had a plan been carried out."""
        pools = self._parts.pools
        granules = {name: pool.num_mapped for name, pool in pools.items()}
        for move in plan:
            granules[move.donor] -= move.granules
            granules[move.receiver] += move.granules
        return {
            name: max(self._parts.least_pages[name], pool.space.pages_in(granules[name]) - 1)
            for name, pool in pools.items()
        }
