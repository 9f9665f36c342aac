"""What goes when a pool is short: run tails, and single pages of groups that can lose them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtide.prefix.habits import Grid
from kvtide.prefix.joint import WindowRule
from kvtide.prefix.order import DEAD, LIVE, LOOSE, Order, Rank
from kvtide.prefix.tree import HOLE, PrefixTree, pages_of
from kvtide.types import ABSENT, IntArray, PageArray

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtide.pool import PageBooks
    from kvtide.prefix.herald import Herald
    from kvtide.prefix.joint import SparseRule
    from kvtide.prefix.node import Node

_LONG = 1024
"""Tokens a page: an end that saves fewer stands in an order of its own. By last use alone the ends
of short questions outlive those of documents; more orders than two follow chance (ADR 0006)."""

_CRUMB = 8
"""Blocks: an eviction leaves no run shorter than this, and takes no less from a long one."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Cached pages a pool could drop next: how many, unused for `age`, and the hit tokens lost with
    them.

    `age` counts matches and publications, never seconds: ranks must agree.
    """

    priority: int
    age: int
    pages: int
    tokens: float


@dataclass(frozen=True, slots=True)
class _Victim:
    """An offer of a window or state group: these blocks of a run, its end's or those within."""

    offer: Offer
    node: Node
    blocks: IntArray
    at_end: bool

    def price(self) -> tuple[int, float]:
        """Smaller goes first."""
        return self.offer.priority, self.offer.tokens / (self.offer.age * self.offer.pages)


class Eviction:
    """Victims by group: dead run tails and loose pages first, then the least recently used.

    Full-lifetime groups lose the tails of leaf runs, in all groups at once: what is only useful
    together goes together. Window and state groups lose single pages of any run: loose ones, which
    neither the run's end nor a boundary on the grid needs, before those that do (`Grid`).
    """

    def __init__(
        self,
        tree: PrefixTree,
        books: Sequence[PageBooks],
        sparse: Sequence[tuple[int, SparseRule]],
        *,
        split: Callable[[Node, int], Node],
        dead_blocks: Callable[[Node], int],
        herald: Herald,
    ) -> None:
        self.clock = 0
        """Matches and publications so far: the only time there is, so that ranks agree."""
        self.num_evicted = [0] * len(books)
        self._tree = tree
        self._books = books
        self._rules = dict(sparse)
        self._herald = herald
        self._split = split
        self._dead_blocks = dead_blocks
        self._runs = Order(1, _run_rank)
        self._loose = {g: Order(2 << 4 * g, _ranker(LOOSE)) for g in self._rules}
        self._within = {g: Order(4 << 4 * g, _ranker(LIVE)) for g in self._rules}
        self._short = {g: Order(8 << 4 * g, _ranker(LIVE)) for g in self._rules}
        self._long = {g: Order(16 << 4 * g, _ranker(LIVE)) for g in self._rules}
        self.grids = {g: Grid(r) for g, r in self._rules.items() if isinstance(r, WindowRule)}
        self.all_sparse = len(self._rules) == len(books)
        for g in self._rules:
            books[g].newly_cached = []

    def _is_long(self, node: Node, group: int) -> bool:
        """Whether a match at the run's end saves `_LONG` tokens for each page it needs there."""
        sinks, start = self._rules[group].kept_span(node.depth, node.num_blocks)
        pages = sinks + node.num_blocks - start
        return self._tree.block_tokens * node.num_blocks >= _LONG * pages

    def queue_run(self, node: Node) -> None:
        """`node` may have become a leaf that nobody pins."""
        self._runs.queue(node)

    def queue_pages(self, node: Node) -> None:
        """`node` may hold pages in window and state groups that nobody uses."""
        for group in self._rules:
            self._queue_end(node, group)
            self._queue_within(node, group)

    def _queue_end(self, node: Node, group: int) -> None:
        (self._long if self._is_long(node, group) else self._short)[group].queue(node)

    def _queue_within(self, node: Node, group: int) -> None:
        self._loose[group].queue(node)
        if group in self.grids:
            self._within[group].queue(node)

    def _on_grid(self, node: Node, group: int, blocks: IntArray) -> IntArray:
        """Those of some blocks of a run that a boundary on the group's grid needs."""
        if group not in self.grids:
            return blocks[:0]
        return self.grids[group].on(blocks + node.depth) - node.depth

    def clear(self) -> None:
        """Forget all victims: the index was emptied."""
        for orders in (self._loose, self._within, self._short, self._long):
            for order in orders.values():
                order.clear()
        self._runs.clear()

    # -- choosing ------------------------------------------------------------------------------

    def offer(self, group: int) -> Offer | None:
        """What dropping the group's least recently used useful pages frees and costs; None if none
        are cached.
        """
        self._note_cached(group)
        if group not in self._rules:
            head = self._runs.coldest()
            if head is None:
                return None
            (kind, priority, used), node = head
            tokens = 0 if kind == DEAD else self._tree.block_tokens * node.num_blocks
            return Offer(priority, self.clock - used + 1, node.num_blocks, tokens)
        victim = self._cheapest(group)
        return None if victim is None else victim.offer

    def _cheapest(self, group: int) -> _Victim | None:
        """The cheapest of a sparse group's coldest ends and its coldest pages on the grid."""
        orders = (self._short[group], self._long[group], self._within[group])
        found = [self._coldest(group, order) for order in orders]
        return min((v for v in found if v is not None), key=_Victim.price, default=None)

    def _coldest(self, group: int, order: Order) -> _Victim | None:
        at_end = order is not self._within[group]
        while (head := order.coldest()) is not None:
            (_, priority, used), node = head
            if order is self._short[group] and self._is_long(node, group):  # it has grown
                order.discard()
                self._long[group].queue(node)
                continue
            _, loose, kept = self._parts(node, group)
            grid = self._on_grid(node, group, loose)
            lost: float = node.num_blocks  # without its window or state no match can end here
            blocks, ends = kept, at_end
            if at_end and len(loose):  # the run has grown past them
                self._queue_within(node, group)
                if len(grid) < len(loose):
                    blocks, ends, lost = np.setdiff1d(loose, grid), False, 0
            elif not at_end:  # what lies between a boundary on the grid and the one before
                blocks, lost = grid, self.grids[group].worth(len(grid)) if len(grid) else 0
            if len(blocks):
                tokens = self._tree.block_tokens * lost
                offer = Offer(priority, self.clock - used + 1, len(blocks), tokens)
                return _Victim(offer, node, blocks, ends)
            order.discard()
        return None

    def evict_worthless(self, group: int, num_pages: int) -> int:
        """Drop up to about `num_pages` pages that no match can use or that are loose; return how
        many.
        """
        self._note_cached(group)
        freed = 0
        if group in self._rules:
            while freed < num_pages:
                dropped = self._drop_loose(group, num_pages - freed)
                if not dropped:
                    break
                freed += dropped
            return freed
        while freed < num_pages:
            head = self._runs.coldest()
            if head is None or head[0][0] != DEAD:
                break
            freed += self._drop_tail(head[1], group, num_pages - freed)
        return freed

    def evict(self, group: int, num_pages: int) -> int:
        """Drop cached pages until `group`'s pool is `num_pages` freer or nothing is left; return
        how many.
        """
        freed = self.evict_worthless(group, num_pages)
        if group in self._rules:
            return freed + self._drain(group, num_pages - freed)
        while freed < num_pages:
            head = self._runs.coldest()
            if head is None:
                break
            freed += self._drop_tail(head[1], group, num_pages - freed)
        return freed

    def _drain(self, group: int, num_pages: int) -> int:
        freed = 0
        while freed < num_pages:
            victim = self._cheapest(group)
            if victim is None:
                break
            freed += self._drop_blocks(victim, group, num_pages - freed)
        return freed

    def _note_cached(self, group: int) -> None:
        """Give the runs whose pages lost their last lease an entry, once each, before an
        eviction.
        """
        owners = self._books[group].newly_cached
        if owners:
            for slot in np.unique(np.concatenate(owners)).tolist():
                node = self._tree.find(slot)
                if node is not None:
                    self._queue_end(node, group)
                    self._queue_within(node, group)
            owners.clear()

    # -- dropping ------------------------------------------------------------------------------

    def _drop_tail(self, node: Node, group: int, wanted: int) -> int:
        """Evict at least `wanted` blocks from the end of a leaf run (all of a short one)."""
        blocks = node.num_blocks
        tail = blocks if wanted + _CRUMB >= blocks else max(wanted, _CRUMB)
        if node.stale:
            node.stale = False
            tail = min(tail, self._dead_blocks(node))
            if not tail:
                return 0
        if tail < blocks:
            self._split(node, blocks - tail)
        freed = 0
        for g, books in enumerate(self._books):
            pages = pages_of(node, g)
            gone = books.disown(pages[pages >= 0] if g in self._rules else pages)
            self.num_evicted[g] += gone
            freed += gone if g == group else 0
            self._herald.changed(node, g, node.pages[g], HOLE * node.num_blocks)
        parent = node.parent
        self._tree.haunt(node)
        if parent is not None and parent.parent is not None:
            parent.used = max(parent.used, node.used)
            self._runs.queue(parent)
        return freed

    def _parts(self, node: Node, group: int) -> tuple[PageArray, IntArray, IntArray]:
        """A run's pages in a sparse group, and the blocks of its unused ones: (pages, loose, kept).

        If the part a match at the end needs has a hole, no match can end there: all is loose.
        """
        pages = pages_of(node, group)
        idle = np.flatnonzero((self._books[group].lease[pages] == 0) & (pages != ABSENT))
        sinks, start = self._rules[group].kept_span(node.depth, len(pages))
        if ABSENT in pages[start:] or (sinks and ABSENT in pages[:sinks]):
            return pages, idle, idle[:0]
        loose = (idle >= sinks) & (idle < start)
        return pages, idle[loose], idle[~loose]

    def _drop_loose(self, group: int, wanted: int) -> int:
        """Evict the loose pages of the runs that come first, all at once; return how many (0: none
        left).

        Runs are taken until their loose parts could cover `wanted`; nothing is done page by page.
        """
        order, rule, books = self._loose[group], self._rules[group], self._books[group]
        chosen: list[tuple[Node, int, int]] = []
        parts: list[bytes] = []
        spared: list[IntArray] = []
        found = 0
        while found < wanted and (head := order.coldest()) is not None:
            node, raw = head[1], head[1].pages[group]
            order.discard()
            sinks, start = rule.kept_span(node.depth, node.num_blocks)
            if HOLE in raw[4 * start :] or HOLE in raw[: 4 * sinks]:
                sinks, start = 0, node.num_blocks  # no match can end here: all is loose
            part = raw[4 * sinks : 4 * start]
            if part.strip(b"\xff"):
                chosen.append((node, sinks, start))
                parts.append(part)
                spared.append(found - sinks + self._on_grid(node, group, np.arange(sinks, start)))
                found += start - sinks
        if not chosen:
            return 0
        pages = np.frombuffer(b"".join(parts), np.int32)
        idle = (books.lease[pages] == 0) & (pages != ABSENT)
        idle[np.concatenate(spared)] = False
        victims = pages[idle]
        left = np.where(idle, ABSENT, pages).astype(np.int32).tobytes()
        at = 0
        for (node, sinks, start), part in zip(chosen, parts, strict=True):
            raw = node.pages[group]
            node.pages[group] = raw[: 4 * sinks] + left[at : at + len(part)] + raw[4 * start :]
            self._herald.changed(node, group, raw, node.pages[group])
            at += len(part)
        self._note_dropped(group, victims, [node for node, _, _ in chosen])
        return len(victims) or self._drop_loose(group, wanted)

    def _drop_blocks(self, victim: _Victim, group: int, wanted: int) -> int:
        """Evict up to `wanted` of a victim's pages: its end is then no longer matchable, or the
        grid's boundaries within.
        """
        node, gone = victim.node, victim.blocks[:wanted]
        raw, pages = node.pages[group], pages_of(node, group)
        if victim.at_end and not node.live_children:
            node.stale = True  # nothing can end here any more: what else the run holds is dead
            self._runs.requeue(node)
        left = pages.copy()
        left[gone] = ABSENT
        node.pages[group] = left.tobytes()
        self._herald.changed(node, group, raw, node.pages[group])
        self._queue_within(node, group)  # what is left of it has become loose
        self._note_dropped(group, pages[gone], [node])
        return len(gone)

    def _note_dropped(self, group: int, pages: PageArray, nodes: list[Node]) -> None:
        self._books[group].disown(pages)
        self.num_evicted[group] += len(pages)
        self._tree.version += 1
        for node in nodes if self.all_sparse else ():
            self.prune(node)

    def prune(self, node: Node | None) -> None:
        """Make ghosts of unpinned leaf runs that have lost every page (layouts without a full
        group).
        """
        while node is not None and self.is_bare(node):
            parent = node.parent
            self._tree.haunt(node)
            node = parent

    def is_bare(self, node: Node) -> bool:
        """Is it an unpinned leaf run without a page? Only where no group keeps every block."""
        if not self.all_sparse or node.ghost or node.parent is None:
            return False
        if node.pins or node.live_children:
            return False
        return not any(pages.strip(b"\xff") for pages in node.pages)


def _run_rank(node: Node) -> Rank | None:
    if node.pins or node.live_children or node.ghost or node.parent is None:
        return None
    return (DEAD if node.stale else LIVE, node.priority, node.used)


def _ranker(kind: int) -> Callable[[Node], Rank | None]:
    """Rank of a run in a sparse group. Whether it has pages to drop is found out when its turn
    comes.
    """

    def rank(node: Node) -> Rank | None:
        if node.ghost or node.parent is None:
            return None
        return (kind, node.priority, node.used)

    return rank
