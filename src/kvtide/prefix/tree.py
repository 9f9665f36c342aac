"""The prefix index: a compressed radix tree of runs of blocks, with one page a block and layer
group.

Matching compares whole runs (memcmp), never block by block, and equality of tokens decides every
hit: the key of a child only finds the candidate. Pages are named here and counted in the pools'
books; the tree never touches bytes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import InvariantError
from kvtide.prefix.index import ChildIndex, default_key
from kvtide.prefix.node import Node

if TYPE_CHECKING:
    from kvtide.types import KeyFunction, PageArray, Scope


HOLE = b"\xff\xff\xff\xff"
"""An absent page in a run's bytes. Page ids are below 2**31, so no other place can look like it."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Where a walk down the tree ended: `blocks` resident blocks along `nodes`.

    The last node matched `into` of its blocks. `ghost_blocks` more would have matched had they not
    been evicted.
    """

    root: Node
    nodes: list[Node]
    into: int
    blocks: int
    ghost_blocks: int

    @property
    def end(self) -> Node | None:
        """The node at whose end the walk stopped; None if it stopped inside a run."""
        if not self.nodes:
            return self.root
        last = self.nodes[-1]
        return last if self.into == last.num_blocks else None


def pages_of(node: Node, group: int) -> PageArray:
    """Page ids of `node`'s run in layer group `group` (a view: read only)."""
    return np.frombuffer(node.pages[group], np.int32)


class PrefixTree:
    """Runs of committed blocks by content, one root a scope. Structure only: who pays
    for pages is the business of `Prefixes`.

    `num_groups` page arrays hang on every node. `ghost_blocks` bounds the keys kept of evicted
    runs.
    """

    def __init__(
        self,
        block_tokens: int,
        num_groups: int,
        *,
        ghost_blocks: int = 0,
        key: KeyFunction = default_key,
    ) -> None:
        self.block_tokens = block_tokens
        self.block_bytes = 4 * block_tokens
        self.num_groups = num_groups
        self.max_ghost_blocks = ghost_blocks
        self.num_ghost_blocks = 0
        self.version = 0
        self.index = ChildIndex(self.block_bytes, key)
        self._roots: dict[Scope, Node] = {}
        self._register: list[Node | None] = [None]
        self._free_slots: list[int] = []
        self._ghosts: deque[Node] = deque()
        self._created = 0
        self._roots_bound = 64

    def root(self, scope: Scope) -> Node:
        """The root of `scope`, made on first use."""
        root = self._roots.get(scope)
        if root is None:
            if len(self._roots) >= self._roots_bound:
                self._prune_roots()
            root = self._roots[scope] = Node(self._number(), b"", 0, 0)
            root.sealed = True
        return root

    def scope_of(self, node: Node) -> Scope:
        """The scope `node` belongs to."""
        top = node
        while top.parent is not None:
            top = top.parent
        return next(scope for scope, root in self._roots.items() if root is top)

    def _prune_roots(self) -> None:
        """Forget scopes that hold nothing, so that many short-lived salts cost no memory."""
        self._roots = {s: r for s, r in self._roots.items() if r.children is not None or r.pins}
        self._roots_bound = 2 * len(self._roots) + 64
        self.version += 1

    def find(self, slot: int) -> Node | None:
        """The node that pages with owner `slot` belong to; None if it is gone."""
        return self._register[slot] if slot < len(self._register) else None

    # -- matching ------------------------------------------------------------------------------

    def child(self, node: Node, block: bytes) -> Node | None:
        """The child of `node` whose run begins with `block`."""
        return self.index.find(node, block)

    def walk(self, root: Node, data: bytes, max_blocks: int) -> Walk:
        """Follow `data` (int32 tokens as bytes) down from `root` for at most `max_blocks`
        blocks.
        """
        step, end, offset, into = self.block_bytes, max_blocks * self.block_bytes, 0, 0
        nodes: list[Node] = []
        node = root
        ghost = 0
        while offset < end:
            child = self.child(node, data[offset : offset + step])
            if child is None:
                break
            if child.ghost:
                ghost = self._ghost_blocks(child, data, offset, end)
                break
            nodes.append(child)
            run = child.tokens
            if offset + len(run) > end or not data.startswith(run, offset):
                into = self.common_blocks(run, data, offset, end)
                offset += into * step
                break
            offset += len(run)
            into = child.num_blocks
            node = child
        return Walk(root, nodes, into, offset // step, ghost)

    def common_blocks(self, run: bytes, data: bytes, offset: int, end: int) -> int:
        """Whole blocks that `run` and `data[offset:end]` share from their start."""
        size = min(len(run), end - offset)
        if data.startswith(run[:size], offset):
            return size // self.block_bytes
        return _common_tokens(run, data, offset, size) // self.block_tokens

    def partial(self, walk: Walk, data: bytes, num_tokens: int) -> tuple[Node, int, int] | None:
        """The block after the walk that shares most of the next `num_tokens` tokens.

        Returns (node, block index in it, shared tokens), or None. Among children only the eight
        newest are compared: enough for a system prompt edited in place, bounded under thousands.
        """
        offset = walk.blocks * self.block_bytes
        last = walk.nodes[-1] if walk.nodes else walk.root
        if walk.nodes and walk.into < last.num_blocks:
            candidates = [(last, walk.into)]
        else:
            candidates = [
                (kid, 0) for kid, _ in zip(last.kids(), range(8), strict=False) if not kid.ghost
            ]
        best: tuple[Node, int, int] | None = None
        size = min(num_tokens * 4, self.block_bytes)
        for node, block in candidates:
            run = node.tokens[block * self.block_bytes :][:size]
            if run[:4] != data[offset : offset + 4]:
                continue
            shared = _common_tokens(run, data, offset, min(size, len(run)))
            if shared and (best is None or shared > best[2]):
                best = (node, block, shared)
        return best

    def gather(self, walk: Walk, group: int, num_blocks: int | None = None) -> PageArray:
        """Page ids of layer group `group` along the walk's first `num_blocks` blocks (default
        all).
        """
        joined = b"".join([node.pages[group] for node in walk.nodes])
        return np.frombuffer(joined, np.int32, walk.blocks if num_blocks is None else num_blocks)

    def _ghost_blocks(self, ghost: Node, data: bytes, offset: int, end: int) -> int:
        total = 0
        while True:
            shared = self.common_blocks(ghost.tokens, data, offset, end)
            total += shared
            offset += shared * self.block_bytes
            if shared < ghost.num_blocks or offset >= end:
                return total
            child = self.child(ghost, data[offset : offset + self.block_bytes])
            if child is None:
                return total
            ghost = child

    # -- structure -----------------------------------------------------------------------------

    def add(self, parent: Node, tokens: bytes) -> Node:
        """A new run without pages under `parent`."""
        num_blocks = len(tokens) // self.block_bytes
        node = Node(self._number(), tokens, parent.depth + parent.num_blocks, num_blocks)
        node.pages = [_absent(num_blocks)] * self.num_groups
        self._enroll(node)
        parent.link(node)
        self.index.add(node)
        self.version += 1
        return node

    def extend(self, node: Node, tokens: bytes) -> None:
        """Lengthen a childless run in place; the new blocks have no pages yet."""
        more = len(tokens) // self.block_bytes
        node.tokens += tokens
        node.num_blocks += more
        node.pages = [pages + _absent(more) for pages in node.pages]
        self.version += 1

    def split(self, node: Node, at: int) -> Node:
        """Cut `node` before its block `at`; returns the new upper run. `node` stays the lower one.

        The caller re-labels the upper pages in the books (`upper.slot`).
        """
        parent, cut = node.parent, at * self.block_bytes
        if parent is None or not 0 < at < node.num_blocks:
            raise InvariantError(f"cannot split a run of {node.num_blocks} blocks at {at}")
        upper = Node(self._number(), node.tokens[:cut], node.depth, at)
        upper.pages = [pages[: 4 * at] for pages in node.pages]
        upper.ghost, upper.used, upper.priority, upper.sealed = (
            node.ghost,
            node.used,
            node.priority,
            True,
        )
        self.index.remove(node)
        parent.unlink(node)
        node.tokens = node.tokens[cut:]
        node.pages = [pages[4 * at :] for pages in node.pages]
        node.depth += at
        node.num_blocks -= at
        self._enroll(upper)
        parent.link(upper)
        upper.link(node)
        self.index.add(upper)
        self.index.add(node)
        if node.ghost:
            self._ghosts.append(upper)
        self.version += 1
        return upper

    def haunt(self, node: Node) -> None:
        """`node`, a run without live children whose pages are gone, becomes a ghost (or
        vanishes).
        """
        parent = node.parent
        if parent is None or node.live_children:
            raise InvariantError("only a leaf run can become a ghost")
        parent.live_children -= 1
        node.ghost = True
        node.pages = []
        self.num_ghost_blocks += node.num_blocks
        self._ghosts.append(node)
        self.version += 1
        self._forget_oldest()

    def remember(self, ghost_blocks: int) -> None:
        """Keep the keys of so many evicted blocks from now on."""
        self.max_ghost_blocks = ghost_blocks
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        while self.num_ghost_blocks > self.max_ghost_blocks:
            oldest = self._ghosts.popleft()
            if oldest.ghost and oldest.parent is not None:
                self._banish(oldest)

    def revive(self, node: Node) -> None:
        """A ghost's tokens were computed again: it is a run without pages, to be filled."""
        if node.parent is None or not node.ghost:
            raise InvariantError("only a ghost can be revived")
        node.ghost = False
        node.pages = [_absent(node.num_blocks)] * self.num_groups
        node.parent.live_children += 1
        self.num_ghost_blocks -= node.num_blocks
        self.version += 1

    def forget(self) -> list[Node]:
        """Cut everything off; returns the live nodes that were in the tree."""
        live = [node for node in self._register if node is not None and not node.ghost]
        for node in self._register:
            if node is not None:
                node.parent = None
                node.tokens = b""
        self.index.clear()
        self._roots.clear()
        self._ghosts.clear()
        self._register = [None]
        self._free_slots.clear()
        self.num_ghost_blocks = 0
        self.version += 1
        return live

    def nodes(self) -> list[Node]:
        """All runs that have pages (no ghosts, no roots)."""
        return [node for node in self._register if node is not None and not node.ghost]

    def _banish(self, ghost: Node) -> None:
        doomed = [ghost]
        for node in doomed:
            doomed.extend(node.kids())
        for node in doomed:
            self._remove(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        if parent is None:
            return
        self.index.remove(node)
        parent.unlink(node)
        self._register[node.slot] = None
        self._free_slots.append(node.slot)
        self.num_ghost_blocks -= node.num_blocks
        node.parent = None
        node.tokens = b""  # an eviction order may name the node a while longer

    def _number(self) -> int:
        self._created += 1
        return self._created

    def _enroll(self, node: Node) -> None:
        if self._free_slots:
            node.slot = self._free_slots.pop()
            self._register[node.slot] = node
        else:
            node.slot = len(self._register)
            self._register.append(node)

    def check(self) -> None:
        """Raise InvariantError unless every run is reachable, indexed and consistent."""
        reached = 0
        stack = [kid for root in self._roots.values() for kid in root.kids()]
        while stack:
            node = stack.pop()
            reached += 1
            self._check_node(node)
            stack.extend(node.kids())
        enrolled = sum(node is not None for node in self._register)
        if reached != enrolled:
            raise InvariantError(f"{enrolled} runs are registered, {reached} can be reached")
        ghosts = sum(n.num_blocks for n in self._register if n is not None and n.ghost)
        if ghosts != self.num_ghost_blocks:
            raise InvariantError(f"num_ghost_blocks is {self.num_ghost_blocks}, not {ghosts}")

    def _check_node(self, node: Node) -> None:
        parent = node.parent
        live = sum(not kid.ghost for kid in node.kids())
        facts = {
            "a run has no parent": parent is not None,
            "a run cannot be found by its first block": parent is not None
            and self.child(parent, node.tokens[: self.block_bytes]) is node,
            "a run is enrolled under another slot": self._register[node.slot] is node,
            "a run's length is off": len(node.tokens) == node.num_blocks * self.block_bytes,
            "a run's pages do not fit its length": node.ghost
            or [len(p) for p in node.pages] == [4 * node.num_blocks] * self.num_groups,
            "live_children is off": live == node.live_children,
            "a ghost has a live child": not (node.ghost and live),
            "a ghost is pinned": not (node.ghost and node.pins),
            "a run starts at the wrong depth": parent is not None
            and node.depth == parent.depth + parent.num_blocks,
        }
        for fault, holds in facts.items():
            if not holds:
                raise InvariantError(fault)


def _common_tokens(run: bytes, data: bytes, offset: int, size: int) -> int:
    ours = np.frombuffer(run, np.int32, size // 4)
    theirs = np.frombuffer(data, np.int32, min(size, len(data) - offset) // 4, offset)
    different = ours[: len(theirs)] != theirs
    first = int(different.argmax()) if len(different) else 0
    return first if len(different) and different[first] else len(theirs)


def _absent(num_blocks: int) -> bytes:
    return HOLE * num_blocks
