"""The standing audits over a whole manager: conservation, single owner, leases, rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import InvariantError
from kvtide.sequence.groups import FullGroup, StateGroup
from kvtide.types import SINK

if TYPE_CHECKING:
    from kvtide.assembly import Parts


def audit(parts: Parts) -> None:
    """Raise InvariantError at the first book that does not balance."""
    parts.budget.check()
    mapped = sum(pool.num_mapped for pool in parts.pools.values())
    if mapped != parts.budget.num_taken:
        raise InvariantError(
            f"{mapped} granules are mapped, {parts.budget.num_taken} of the budget are taken"
        )
    for pool in parts.pools.values():
        pool.check()
    parts.prefixes.check()
    parts.ledger.holdings.rows.check()
    for group in parts.ledger.holdings.groups:
        counted = parts.ledger.holdings.count_leases(group)
        if not np.array_equal(counted, group.books.lease):
            page = int(np.flatnonzero(counted != group.books.lease)[0])
            raise InvariantError(
                f"pool {group.pool.name!r}: page {page} has {group.books.lease[page]} leases, "
                f"{counted[page]} holders"
            )
        _audit_rows(parts, group)


def _audit_rows(parts: Parts, group: FullGroup | StateGroup) -> None:
    """Every exported row names only existing pages, each once, never the sink; others are clear."""
    table, books, name = group.table.rows, group.books, group.pool.name
    live = parts.ledger.holdings.live
    for row in range(len(table)):
        entries = table[row]
        held = entries[entries >= 0]
        if row not in live and len(held):
            raise InvariantError(f"pool {name!r}: row {row} is free but names pages")
        if (
            len(np.unique(held)) != len(held)
            or (held == SINK).any()
            or not books.exists[held].all()
        ):
            raise InvariantError(
                f"pool {name!r}: row {row} names a page twice, the sink, or one that is gone"
            )
        if isinstance(group, FullGroup) and len(held):
            last = int(np.flatnonzero(entries >= 0)[-1])
            if last >= parts.ledger.holdings.rows.blocks(row):
                raise InvariantError(f"pool {name!r}: row {row} holds block {last} beyond its room")
