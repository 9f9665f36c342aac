"""What is reusable: the tree joined with the pools' books. Publish, match, pin, evict, relabel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtide.errors import InvariantError
from kvtide.pool import PageBooks
from kvtide.prefix.joint import BoolArray, MirrorRule, Rule, SparseRule, longest_hit
from kvtide.prefix.node import Node
from kvtide.prefix.order import DEAD, LIVE, LOOSE, Order, Rank
from kvtide.prefix.tree import PrefixTree, Walk, pages_of
from kvtide.types import PageArray


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix all layer groups can use together. Holds nothing; good for one tree version.

    `hit` tokens can be reused: `blocks` whole blocks and, if `partial` names a (node, block), the
    first `hit - blocks * block_tokens` tokens of a copy of that block. `full_blocks` is what the
    full-lifetime groups alone would have allowed: a boundary worth keeping when it is more.
    """

    walk: Walk
    version: int
    hit: int
    blocks: int
    partial: tuple[Node, int] | None

    @property
    def full_blocks(self) -> int:
        """Blocks that the full-lifetime groups hold."""
        return self.walk.blocks


@dataclass(frozen=True, slots=True)
class Offer:
    """Cached pages a pool could drop next: how many, unused for `age`, and the hit tokens lost with them."""

    priority: int
    age: int
    pages: int
    tokens: int


class Prefixes:
    """Cached prefixes of one manager.

    `books[g]` are the books of the pool that holds layer group g; `rules[g]` says what a match needs
    of it (None: every block, for full-lifetime groups).
    """

    def __init__(
        self, tree: PrefixTree, books: Sequence[PageBooks], rules: Sequence[Rule | None], *, partial: bool
    ) -> None:
        self.tree = tree
        self.clock = 0
        self.num_evicted = [0] * len(books)
        self._books = books
        self._rules = rules
        self._partial = partial
        self._needs = [(g, rule) for g, rule in enumerate(rules) if rule is not None]
        self._sparse = [(g, rule) for g, rule in self._needs if not isinstance(rule, MirrorRule)]
        self._runs = Order(1, self._run_rank)
        self._all_sparse = len(self._sparse) == len(books)
        self._loose = {g: Order(4 << 2 * g, self._loose_rank(g, rule)) for g, rule in self._sparse}
        self._kept = {g: Order(8 << 2 * g, self._kept_rank(g, rule)) for g, rule in self._sparse}
        for g in self._loose:
            books[g].newly_cached = []

    # -- matching ------------------------------------------------------------------------------

    def match(self, scope_root: Node, data: bytes, num_tokens: int) -> Match:
        """Longest reusable prefix of `data`, at most `num_tokens` - 1 tokens. Changes nothing."""
        tree = self.tree
        walk = tree.walk(scope_root, data, (num_tokens - 1) // tree.block_tokens)
        blocks = self._usable_blocks(walk)
        hit = blocks * tree.block_tokens
        partial = None
        if self._partial and blocks == walk.blocks:
            found = tree.partial(walk, data, num_tokens - 1 - hit)
            if found is not None and self._resident(found[0], found[1]):
                partial = (found[0], found[1])
                hit += found[2]
        return Match(walk, tree.version, hit, blocks, partial)

    def _usable_blocks(self, walk: Walk) -> int:
        if not walk.blocks or not self._needs:
            return walk.blocks
        needs = [(rule, self.tree.gather(walk, g) >= 0) for g, rule in self._needs]
        return longest_hit(walk.blocks, needs)

    def _resident(self, node: Node, block: int) -> bool:
        return all(pages_of(node, g)[block] >= 0 for g in range(len(self._books)))

    def page(self, node: Node, block: int, group: int) -> PageArray:
        """The page of one block of a run in layer group `group`, as an array of one."""
        return pages_of(node, group)[block : block + 1]

    def touch(self, match: Match) -> None:
        """The match is used now: refresh the runs that serve it."""
        self.clock += 1
        for node in match.walk.nodes[-2:]:
            node.used = self.clock
        depth = match.blocks
        for _, rule in self._sparse:
            first = rule.first_needed(depth)
            for node in reversed(match.walk.nodes):
                if node.depth + node.num_blocks <= first:
                    break
                if node.depth < depth:
                    node.used = self.clock

    # -- pinning -------------------------------------------------------------------------------

    def anchor(self, match: Match) -> Node:
        """Pin the node where the match's whole blocks end (splitting a run if need be); return it."""
        nodes, blocks = match.walk.nodes, match.blocks
        node = match.walk.root
        for candidate in nodes:
            if candidate.depth >= blocks:
                break
            node = candidate
        if node.depth + node.num_blocks > blocks:
            node = self._split(node, blocks - node.depth)
        node.pins += 1
        return node

    def unpin(self, node: Node) -> None:
        """End one pin; what nobody else protects becomes evictable."""
        node.pins -= 1
        if node.pins < 0:
            raise InvariantError("a run was unpinned more often than pinned")
        if not node.pins and not node.live_children:
            self._runs.queue(node)
            if self._all_sparse:
                self._prune(node)

    def ancestor(self, node: Node, blocks: int) -> Node:
        """The node on the path to `node` that ends after `blocks` blocks, splitting a run if need be."""
        while node.parent is not None and node.depth >= blocks:
            node = node.parent
        if node.depth + node.num_blocks > blocks:
            return self._split(node, blocks - node.depth)
        return node

    def _split(self, node: Node, at: int) -> Node:
        upper = self.tree.split(node, at)
        if not upper.ghost:
            for g, books in enumerate(self._books):
                pages = pages_of(upper, g)
                books.adopt(pages[pages >= 0], upper.slot)
            for g in self._loose:
                self._queue(g, upper)
        return upper

    def _queue(self, group: int, node: Node) -> None:
        self._loose[group].queue(node)
        self._kept[group].queue(node)

    # -- publishing ----------------------------------------------------------------------------

    def publish(self, node: Node, data: bytes, pages: list[PageArray], *, priority: int = 0) -> Node:
        """Name blocks that follow `node` (pinned by the caller); returns the new end, pinned instead.

        `data` are the blocks' tokens, `pages[g]` their pages in group g (-1 where there is none), all
        leased by the caller. Where the tree has a page already the caller's lease moves to it and
        `pages[g]` is rewritten in place; where it has none it adopts the caller's.
        """
        self.clock += 1
        start, tree = node, self.tree
        step, offset = tree.block_bytes, 0
        while offset < len(data):
            child = tree.child(node, data[offset : offset + step])
            if child is not None:
                shared = tree.common_blocks(child.tokens, data, offset, len(data))
                node = self._split(child, shared) if shared < child.num_blocks else child
                if node.ghost:
                    tree.revive(node)
            elif node is start and self._growable(node):
                tree.extend(node, data[offset:])
                shared = (len(data) - offset) // step
            else:
                node = tree.add(node, data[offset:])
                shared = node.num_blocks
            at = offset // step
            self._fill(node, node.num_blocks - shared, [p[at : at + shared] for p in pages])
            node.used = self.clock
            node.stale = False
            node.priority = max(node.priority, priority)
            offset += shared * step
        if node is not start:
            node.pins += 1
            self.unpin(start)
        return node

    def _growable(self, node: Node) -> bool:
        return not node.sealed and node.pins == 1 and node.children is None

    def _fill(self, node: Node, at: int, pages: list[PageArray]) -> None:
        """Give the blocks of `node` from `at` on the caller's pages, or the caller the node's."""
        for g, mine in enumerate(pages):
            books = self._books[g]
            if at == 0 and not _any_present(node.pages[g]):
                given = mine[mine >= 0]
                books.adopt(given, node.slot)
                node.pages[g] = mine.tobytes()
                continue
            theirs = pages_of(node, g)[at : at + len(mine)]
            twice = (theirs >= 0) & (mine >= 0) & (theirs != mine)
            if twice.any():
                books.share(theirs[twice])
                books.release(mine[twice])
                mine[twice] = theirs[twice]
            new = (theirs < 0) & (mine >= 0)
            if new.any():
                books.adopt(mine[new], node.slot)
                merged = pages_of(node, g).copy()
                merged[at : at + len(mine)][new] = mine[new]
                node.pages[g] = merged.tobytes()

    # -- evicting ------------------------------------------------------------------------------

    def coldest(self, group: int) -> Rank | None:
        """Rank of what `evict(group, ...)` would drop first; None if it has nothing to drop."""
        self._note_cached(group)
        heads = [order.coldest() for order in self._orders(group)]
        return next((head[0] for head in heads if head is not None), None)

    def offer(self, group: int) -> Offer | None:
        """What dropping the group's coldest useful pages would free and cost; None if there is nothing."""
        self._note_cached(group)
        head = self._orders(group)[-1].coldest()
        if head is None:
            return None
        (kind, priority, used), node = head
        pages, tokens = 1, self.tree.block_tokens
        if group in self._loose:
            idle, kept = self._idle(node, group, dict(self._sparse)[group])
            pages = int(np.count_nonzero(idle & kept))
            tokens *= node.num_blocks  # without its window or state the whole run ends no match
        return Offer(priority, self.clock - used + 1, pages, 0 if kind == DEAD else tokens)

    def evict(self, group: int, num_pages: int) -> int:
        """Drop cached pages until `group`'s pool is `num_pages` freer or nothing is left; return how many."""
        self._note_cached(group)
        freed = 0
        for order in self._orders(group):
            while freed < num_pages:
                head = order.coldest()
                if head is None:
                    break
                wanted = num_pages - freed
                if order is self._runs:
                    freed += self._drop_tail(head[1], group, wanted)
                else:
                    freed += self._drop_sparse(head[1], group, wanted)
        return freed

    def _note_cached(self, group: int) -> None:
        """Give the runs whose pages lost their last lease an entry, once each, before an eviction."""
        owners = self._books[group].newly_cached
        if owners:
            for slot in np.unique(np.concatenate(owners)):
                node = self.tree.find(int(slot))
                if node is not None:
                    self._queue(group, node)
            owners.clear()

    def _orders(self, group: int) -> tuple[Order, ...]:
        """Where the group's victims come from, first choice first."""
        if group in self._loose:
            return self._loose[group], self._kept[group]
        return (self._runs,)

    def _run_rank(self, node: Node) -> Rank | None:
        if node.pins or node.live_children or node.ghost or node.parent is None:
            return None
        return (DEAD if node.stale else LIVE, node.priority, node.used)

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
            gone = books.disown(pages[pages >= 0])
            self.num_evicted[g] += gone
            freed += gone if g == group else 0
        parent = node.parent
        self.tree.haunt(node)
        if parent is not None and parent.parent is not None:
            parent.used = max(parent.used, node.used)
            if not parent.live_children and not parent.pins:
                self._runs.queue(parent)
        return freed

    def _loose_rank(self, group: int, rule: SparseRule) -> Callable[[Node], Rank | None]:
        def rank(node: Node) -> Rank | None:
            idle, kept = self._idle(node, group, rule)
            return (LOOSE, node.priority, node.used) if (idle & ~kept).any() else None

        return rank

    def _kept_rank(self, group: int, rule: SparseRule) -> Callable[[Node], Rank | None]:
        def rank(node: Node) -> Rank | None:
            idle, kept = self._idle(node, group, rule)
            return (LIVE, node.priority, node.used) if (idle & kept).any() else None

        return rank

    def _idle(self, node: Node, group: int, rule: SparseRule) -> tuple[BoolArray, BoolArray]:
        """Which of a run's pages in a sparse group have no user, and which serve a match at its end."""
        if node.ghost or node.parent is None:
            return _NONE, _NONE
        pages = pages_of(node, group)
        present = pages >= 0
        return present & (self._books[group].lease[pages] == 0), rule.kept(present, node.depth)

    def _drop_sparse(self, node: Node, group: int, wanted: int) -> int:
        """Evict window pages or snapshots of one run: the loose ones first, from the front."""
        rule, books = dict(self._sparse)[group], self._books[group]
        pages = pages_of(node, group).copy()
        idle, kept = self._idle(node, group, rule)
        loose = idle & ~kept
        if not loose.any():
            loose = idle
            if not node.live_children:
                node.stale = True  # nothing can end here any more: what else the run holds is dead
                self._runs.requeue(node)
        victims = np.flatnonzero(loose)[:wanted]
        books.disown(pages[victims])
        pages[victims] = -1
        node.pages[group] = pages.tobytes()
        self._queue(group, node)  # what is left may have become loose
        self.num_evicted[group] += len(victims)
        self.tree.version += 1
        self._prune(node)
        return len(victims)

    def _prune(self, node: Node | None) -> None:
        """Make ghosts of unpinned leaf runs that have lost every page (layouts without a full group)."""
        while node is not None and node.parent is not None and not (node.pins or node.live_children):
            if any(_any_present(pages) for pages in node.pages):
                return
            parent = node.parent
            self.tree.haunt(node)
            node = parent

    def clear(self) -> None:
        """Drop every cached prefix; leased pages stay with their sequences, which publish no more."""
        for node in self.tree.forget():
            for g, books in enumerate(self._books):
                pages = pages_of(node, g)
                books.disown(pages[pages >= 0])
        self._runs.clear()
        for order in (*self._loose.values(), *self._kept.values()):
            order.clear()

    # -- moving and facts ----------------------------------------------------------------------

    def relabel(self, group: int, owners: PageArray, remap: PageArray) -> None:
        """Pages of `group` moved: `remap[old]` is the new id. `owners` are the slots that named them."""
        for slot in np.unique(owners[owners > 0]):
            node = self.tree.find(int(slot))
            if node is None:
                raise InvariantError(f"a page names owner {slot}, which is no node of the tree")
            node.pages[group] = remap[pages_of(node, group)].tobytes()
        self.tree.version += 1

    def dead_pages(self) -> list[int]:
        """Pages a group that no match can use any more: tails of runs whose window or state is gone."""
        dead = [0] * len(self._books)
        for leaf in self.tree.nodes() if self._sparse else ():
            if leaf.live_children or leaf.pins:
                continue
            tail = self._dead_blocks(leaf)
            for g in range(len(dead)):
                dead[g] += int(np.count_nonzero(pages_of(leaf, g)[leaf.num_blocks - tail :] >= 0))
        return dead

    def _dead_blocks(self, leaf: Node) -> int:
        path = leaf.path()
        walk = Walk(path[0], path, leaf.num_blocks, leaf.depth + leaf.num_blocks, 0)
        return min(walk.blocks - self._usable_blocks(walk), leaf.num_blocks)

    def check(self) -> None:
        """Raise InvariantError unless tree and books agree about who names which page."""
        self.tree.check()
        for g, books in enumerate(self._books):
            owner = np.zeros_like(books.owner)
            for node in self.tree.nodes():
                pages = pages_of(node, g)
                held = pages[pages >= 0]
                if owner[held].any() or len(np.unique(held)) != len(held):
                    raise InvariantError(f"group {g}: a page stands at two places of the tree")
                owner[held] = node.slot
                if self._rules[g] is None and len(held) != node.num_blocks:
                    raise InvariantError(f"group {g}: a run has a hole")
            if not np.array_equal(owner, books.owner):
                raise InvariantError(f"group {g}: the tree and the books name different owners")


_CRUMB = 8
"""Blocks: an eviction leaves no run shorter than this, and takes no less from a long one."""


_NONE = np.zeros(1, np.bool_)


def _any_present(pages: bytes) -> bool:
    return bool(pages.strip(b"\xff"))


assert DEAD < LOOSE < LIVE
