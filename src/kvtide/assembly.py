"""Construction: layout and memory to pools, books and tables, with every impossibility refused
first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import ConfigError
from kvtide.layout import Full, LayerGroup, Layout, Mirror, State, Window
from kvtide.memory import Budget, Memory
from kvtide.pool import Fences, Pool
from kvtide.prefix import MirrorRule, Prefixes, PrefixTree, StateRule, WindowRule
from kvtide.prefix.herald import Herald
from kvtide.prefix.index import default_key
from kvtide.rebalance import Allowance, Backlog, Ground, Journal, Mover
from kvtide.sequence import Holdings, Ledger, PageTable
from kvtide.sequence.groups import FullGroup, StateGroup, WindowGroup
from kvtide.sequence.rows import Rows
from kvtide.sizing import granules_by_share, least_pages
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtide.config import Options

GroupBooks = FullGroup | StateGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything a manager is made of."""

    memory: Memory
    budget: Budget
    fences: Fences
    pools: Mapping[str, Pool]
    tables: Mapping[str, PageTable]
    prefixes: Prefixes
    mover: Mover
    journal: Journal
    ground: Ground
    backlog: Backlog
    least: Mapping[str, int]
    """Granules each pool needs for one longest sequence and its floor."""
    least_pages: Mapping[str, int]
    """The same in pages, the sinks apart."""
    ghost_ratio: float
    ledger: Ledger


def assemble(
    layout: Layout, memory: Memory, max_sequences: int, max_tokens: int, options: Options
) -> Parts:
    """Build the parts, map the start-up granules, check that a longest sequence fits. Raises
    ConfigError.
    """
    _require_positive(max_sequences=max_sequences, max_tokens=max_tokens)
    groups = tuple(_plain(group, max_tokens) for group in layout.groups)
    _check_names(groups, options)
    budget, fences = Budget(memory), Fences()
    if options.budget_bytes is not None:
        budget.set_quota(options.budget_bytes // memory.granule_bytes)
    rows = Rows(max_sequences, max_tokens, layout.block_tokens)
    pages = _least_pages(groups, max_tokens, options)
    size = memory.granule_bytes
    least = {g.name: ceil_div((1 + pages[g.name]) * g.page_bytes, size) for g in groups}
    _require_fit(least, budget.quota, size, max_tokens)
    sizes = _start_granules(groups, budget.quota, size, least, options)
    # Tables first: a buffer may be refused, and nothing has been mapped yet.
    tables = [_table(group, rows, options) for group in groups]
    books: list[GroupBooks] = []
    for index, (group, table) in enumerate(zip(groups, tables, strict=True)):
        arena = memory.reserve(memory.num_granules)
        pool = Pool(group.name, group.page_bytes, budget, arena, fences)
        _set_up(pool, options)
        pool.grow(np.arange(sizes[group.name]))
        books.append(_group_books(index, group, pool, table))
    prefixes, pools = _prefixes(layout, books, options), [g.pool for g in books]
    mover = _mover(pools, prefixes, budget, fences, options)
    journal = Journal([p.name for p in pools], options.events)
    ground = Ground(mover, journal, options.mode)
    holdings = Holdings(rows, books, prefixes, ground)
    mover.relabel = holdings.relabel
    ground.yield_optional = holdings.publish_snapshots
    return Parts(
        memory=memory,
        budget=budget,
        fences=fences,
        pools={p.name: p for p in pools},
        tables={g.pool.name: g.table for g in books},
        prefixes=prefixes,
        mover=mover,
        journal=journal,
        ground=ground,
        backlog=Backlog(mover, journal, keeps_split=options.mode != "elastic"),
        least=least,
        least_pages=pages,
        ghost_ratio=options.ghost_ratio,
        ledger=Ledger(holdings),
    )


def _require_positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}; use 1 or more")


def _plain(group: LayerGroup, max_tokens: int) -> LayerGroup:
    """A window that no sequence can outgrow needs no window books; its pool keeps its name."""
    if isinstance(group.lifetime, Window) and group.lifetime.tokens >= max_tokens:
        return replace(group, lifetime=Full())
    return group


def _check_names(groups: tuple[LayerGroup, ...], options: Options) -> None:
    names = {group.name for group in groups}
    for field, given in (
        ("pool_ratio", set(options.pool_ratio or {})),
        ("floor_pages", set(options.floor_pages)),
        ("ceiling_pages", set(options.ceiling_pages)),
        ("tables", set(options.tables)),
    ):
        if given - names:
            raise ConfigError(
                f"{field} names {sorted(given - names)}; the pools are {sorted(names)}"
            )
    if options.pool_ratio is not None and set(options.pool_ratio) != names:
        missing = sorted(names - set(options.pool_ratio))
        raise ConfigError(
            f"pool_ratio has {len(options.pool_ratio)} shares for {len(names)} pools; add {missing}"
        )
    states = [group.name for group in groups if group.is_state]
    if options.partial_reuse and states:
        raise ConfigError(
            f"partial_reuse is on, but pool {states[0]!r} holds states, which exist only at block "
            "boundaries; "
            "turn partial_reuse off"
        )


def _group_books(index: int, group: LayerGroup, pool: Pool, table: PageTable) -> GroupBooks:
    block = group.block_tokens
    match group.lifetime:
        case State(interval_tokens):
            return StateGroup(index, pool, table, interval_tokens)
        case Window(tokens, sinks):
            return WindowGroup(index, pool, table, WindowRule(tokens, sinks, block))
        case Mirror(look_ahead):
            return FullGroup(index, pool, table, MirrorRule(look_ahead, block))
        case _:
            return FullGroup(index, pool, table, None)


def _prefixes(layout: Layout, books: list[GroupBooks], options: Options) -> Prefixes:
    most = max(g.pool.space.num_pages for g in books)
    tree = PrefixTree(
        layout.block_tokens,
        len(books),
        ghost_blocks=int(options.ghost_ratio * most),
        key=options.key or default_key,
    )
    partial = options.partial_reuse
    if partial is None:
        partial = not any(isinstance(g.rule, StateRule) for g in books)
    herald = Herald(tree, [g.pool.name for g in books], options.events)
    rules = [g.rule for g in books]
    return Prefixes(tree, [g.books for g in books], rules, partial=partial, herald=herald)


def _set_up(pool: Pool, options: Options) -> None:
    pool.events = options.events
    if pool.name in options.ceiling_pages:
        pool.limit = min(pool.limit, 1 + options.ceiling_pages[pool.name])


def _table(group: LayerGroup, rows: Rows, options: Options) -> PageTable:
    width = 1 if group.is_state else rows.max_blocks
    return PageTable(len(rows.length), width, rows.block_tokens, options.tables.get(group.name))


def _mover(
    pools: list[Pool], prefixes: Prefixes, budget: Budget, fences: Fences, options: Options
) -> Mover:
    granule, per_thousand = budget.granule_bytes, options.move_bytes_per_1000_steps
    allowance = Allowance(
        max(1, options.move_bytes_per_step // granule),
        None if per_thousand is None else per_thousand // granule,
    )
    mover = Mover(pools, prefixes, budget, fences, allowance)
    mover.floors = [p.space.granules_for(1 + options.floor_pages.get(p.name, 0)) for p in pools]
    for g, pool in enumerate(pools):
        if pool.name in options.ceiling_pages:
            mover.ceilings[g] = pool.space.granules_for(1 + options.ceiling_pages[pool.name])
    return mover


def _least_pages(
    groups: tuple[LayerGroup, ...], max_tokens: int, options: Options
) -> dict[str, int]:
    """Pages each pool needs for one longest sequence and its floor. ConfigError if its ceiling is
    lower.
    """
    least: dict[str, int] = {}
    for group in groups:
        pages = least_pages(group, max_tokens)
        if pages > options.ceiling_pages.get(group.name, pages):
            raise ConfigError(
                f"ceiling_pages[{group.name!r}] is {options.ceiling_pages[group.name]}, one "
                f"sequence of max_tokens = {max_tokens:,} needs {pages}; raise it or lower "
                "max_tokens"
            )
        least[group.name] = max(pages, options.floor_pages.get(group.name, 0))
    return least


def _require_fit(least: Mapping[str, int], total: int, size: int, max_tokens: int) -> None:
    need = sum(least.values())
    if need > total:
        parts = ", ".join(f"{n} {g * size:,}" for n, g in least.items())
        raise ConfigError(
            f"memory of {total * size:,} bytes cannot hold one sequence of max_tokens = "
            f"{max_tokens:,} (and the floors): {need * size:,} bytes are needed ({parts}); give "
            "more memory or lower max_tokens"
        )


def _start_granules(
    groups: tuple[LayerGroup, ...], total: int, size: int, least: dict[str, int], options: Options
) -> dict[str, int]:
    """Granules to map per pool at start, of `total` granules of `size` bytes. ConfigError if a
    given share cannot hold one longest sequence.
    """
    if options.pool_ratio is not None:
        shares = granules_by_share(options.pool_ratio, total)
        _require_least(shares, least, options.floor_pages, size)
        return shares
    if options.mode != "elastic":
        need = sum(least.values())
        return granules_by_share({n: g / need for n, g in least.items()}, total)
    return {g.name: ceil_div(g.page_bytes, size) for g in groups}


def _require_least(
    shares: Mapping[str, int], least: Mapping[str, int], floors: Mapping[str, int], size: int
) -> None:
    total = sum(shares.values())
    for name, granules in shares.items():
        if granules < least[name]:
            floor = f" and its floor of {floors[name]} pages" if floors.get(name) else ""
            raise ConfigError(
                f"pool_ratio gives pool {name!r} {granules * size:,} bytes, one sequence of "
                f"max_tokens{floor} needs {least[name] * size:,}; raise its share to "
                f"{least[name] / total:.4f} or more, or lower max_tokens"
            )
