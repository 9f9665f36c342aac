"""What is reusable: the tree joined with the pools' books. Publish, match, pin, evict, relabel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import InvariantError
from kvtide.prefix.eviction import Eviction
from kvtide.prefix.herald import Herald
from kvtide.prefix.joint import MirrorRule, Rule, WindowRule, longest_hit
from kvtide.prefix.tree import HOLE, PrefixTree, Walk, pages_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtide.pool import PageBooks
    from kvtide.prefix.node import Node
    from kvtide.types import PageArray


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix all layer groups can use together. Holds nothing; good for one tree
    version.

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


class Prefixes:
    """Cached prefixes of one manager.

    `books[g]` are the books of the pool that holds layer group g; `rules[g]` says what a match
    needs of it (None: every block, for full-lifetime groups).
    """

    def __init__(
        self,
        tree: PrefixTree,
        books: Sequence[PageBooks],
        rules: Sequence[Rule | None],
        *,
        partial: bool,
        herald: Herald | None = None,
    ) -> None:
        self.tree = tree
        self.num_admitted = 0
        self._books = books
        self._rules = rules
        # What a drafter wrote for a token depends on the tokens that follow it.
        backs_off = any(isinstance(rule, MirrorRule) and rule.look_ahead for rule in rules)
        self._partial = partial and not backs_off
        self._herald = herald = herald or Herald(tree, (), None)
        self._needs = [(g, rule) for g, rule in enumerate(rules) if rule is not None]
        self._sparse = [(g, rule) for g, rule in self._needs if not isinstance(rule, MirrorRule)]
        self.eviction = Eviction(
            tree,
            books,
            self._sparse,
            split=self._split,
            dead_blocks=self._dead_blocks,
            herald=herald,
        )

    @property
    def clock(self) -> int:
        """Matches and publications so far."""
        return self.eviction.clock

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
        """Blocks of the walk that all groups can use together."""
        if (
            not walk.blocks
            or not self._needs
            or all(self._met_at_end(walk, g, rule) for g, rule in self._needs)
        ):
            return walk.blocks
        needs = [(rule, self.tree.gather(walk, g) >= 0) for g, rule in self._needs]
        return longest_hit(walk.blocks, needs)

    @staticmethod
    def _met_at_end(walk: Walk, group: int, rule: Rule) -> bool:
        """Does the whole walk satisfy the rule? The usual case, told without building arrays."""
        if isinstance(rule, MirrorRule):
            return False
        first = rule.first_needed(walk.blocks)
        sinks = rule.sink_blocks if isinstance(rule, WindowRule) else 0
        for node in reversed(walk.nodes):
            raw = node.pages[group]
            stop = walk.blocks - node.depth
            if HOLE in raw[4 * max(0, first - node.depth) : 4 * stop]:
                return False
            if HOLE in raw[: 4 * max(0, min(sinks - node.depth, stop))]:
                return False
            if node.depth <= first and not sinks:
                break
        return True

    def _resident(self, node: Node, block: int) -> bool:
        return all(pages_of(node, g)[block] >= 0 for g in range(len(self._books)))

    def page(self, node: Node, block: int, group: int) -> PageArray:
        """The page of one block of a run in layer group `group`, as an array of one."""
        return pages_of(node, group)[block : block + 1]

    def touch(self, match: Match) -> None:
        """A sequence is admitted with the match: refresh the runs that serve it."""
        self.num_admitted += 1
        self.eviction.clock += 1
        if self.eviction.grids:
            self._learn(match)
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

    def _learn(self, match: Match) -> None:
        """Tell the grids where the match ended; a run it ended within was split by `anchor`."""
        at_end = start = parted = 0
        if match.full_blocks > match.blocks:
            if match.walk.end is None:  # it would have ended within a run
                start, parted = match.walk.nodes[-1].depth, match.full_blocks
        elif match.blocks:
            last = match.walk.nodes[-1]
            if last.depth < match.blocks:
                at_end = last.num_blocks
            elif last.parent is not None:
                start, parted = last.parent.depth, match.blocks
        for grid in self.eviction.grids.values():
            grid.learn(at_end, start, parted)

    # -- pinning -------------------------------------------------------------------------------

    def anchor(self, match: Match) -> Node:
        """Pin the node where the match's whole blocks end (splitting a run if need be); return
        it.
        """
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
            self.eviction.queue_run(node)
            if self.eviction.all_sparse:
                self.eviction.prune(node)

    def ancestor(self, node: Node, blocks: int) -> Node:
        """The node on the path to `node` that ends after `blocks` blocks, splitting a run if need
        be.
        """
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
            for part in (upper, node):  # each is shorter than the run was: ranked anew
                self.eviction.queue_pages(part)
            if self.eviction.is_bare(node):
                self.tree.haunt(node)  # what is cut off holds nothing, and nobody would look again
        return upper

    # -- publishing ----------------------------------------------------------------------------

    def publish(
        self, node: Node, data: bytes, pages: list[PageArray], *, priority: int = 0
    ) -> Node:
        """Name blocks that follow `node` (pinned by the caller); returns the new end, pinned
        instead.

        `data` are the blocks' tokens, `pages[g]` their pages in group g (-1 where there is none),
        all leased by the caller. Where the tree has a page already the caller's lease moves to it
        and `pages[g]` is rewritten in place; where it has none it adopts the caller's.
        """
        self.eviction.clock += 1
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
        if node.sealed and (self._sparse or node.parent is None):
            return False  # without windows and states a run's end needs nothing of its own
        return node.pins == 1 and node.children is None

    def _fill(self, node: Node, at: int, pages: list[PageArray]) -> None:
        """Give the blocks of `node` from `at` on the caller's pages, or the caller the node's."""
        for g, mine in enumerate(pages):
            before, stop = node.pages[g], 4 * (at + len(mine))
            if _any_present(before[4 * at : stop]):
                self._merge(node, at, g, mine)
            else:
                self._books[g].adopt(mine[mine >= 0], node.slot)
                node.pages[g] = before[: 4 * at] + mine.tobytes() + before[stop:]
            self._herald.changed(node, g, before, node.pages[g])

    def _merge(self, node: Node, at: int, group: int, mine: PageArray) -> None:
        """Where `node` has a page already the caller's lease moves to it, else it adopts `mine`."""
        books = self._books[group]
        theirs = pages_of(node, group)[at : at + len(mine)]
        twice = (theirs >= 0) & (mine >= 0) & (theirs != mine)
        if twice.any():
            books.share(theirs[twice])
            books.release(mine[twice])
            mine[twice] = theirs[twice]
        new = (theirs < 0) & (mine >= 0)
        if new.any():
            books.adopt(mine[new], node.slot)
            merged = pages_of(node, group).copy()
            merged[at : at + len(mine)][new] = mine[new]
            node.pages[group] = merged.tobytes()

    def clear(self) -> None:
        """Drop every cached prefix; leased pages stay with their sequences, which publish no
        more.
        """
        for node in self.tree.forget():
            for g, books in enumerate(self._books):
                pages = pages_of(node, g)
                books.disown(pages[pages >= 0])
        self.eviction.clear()

    # -- moving and facts ----------------------------------------------------------------------

    def relabel(self, group: int, owners: PageArray, remap: PageArray) -> None:
        """Pages of `group` moved: `remap[old]` is the new id. `owners` are the slots that named
        them.
        """
        for slot in np.unique(owners[owners > 0]):
            node = self.tree.find(int(slot))
            if node is None:
                raise InvariantError(f"a page names owner {slot}, which is no node of the tree")
            node.pages[group] = remap[pages_of(node, group)].tobytes()
        self.tree.version += 1

    def dead_pages(self) -> list[int]:
        """Pages a group that no match can use any more: tails of runs whose window or state is
        gone.
        """
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


def _any_present(pages: bytes) -> bool:
    return bool(pages.strip(b"\xff"))
