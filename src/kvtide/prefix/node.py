"""A run of blocks in the prefix tree, and the sibling list that holds its children."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Node:
    """`num_blocks` consecutive blocks that follow the parent's run.

    `tokens` are the run's token ids (int32 bytes); `pages[g]` the page ids of layer group g, one
    int32 per block (as bytes: 33 bytes of overhead where an array has 112), -1 where absent. A run
    whose pages were all evicted stays a while as a ghost: its key, no pages.

    Invariants: a ghost has only ghost children; `live_children` counts the others; `pins` counts
    the sequences whose published path ends here, which protects this node and all its ancestors.
    """

    __slots__ = (
        "children",
        "depth",
        "ghost",
        "live_children",
        "next",
        "num_blocks",
        "number",
        "pages",
        "parent",
        "pins",
        "prev",
        "priority",
        "queued",
        "sealed",
        "slot",
        "stale",
        "tokens",
        "used",
    )  # fmt: skip

    def __init__(self, number: int, tokens: bytes, depth: int, num_blocks: int) -> None:
        self.number = number  # creation order: the last tie-break, equal on all ranks
        self.slot = 0  # index in the tree's register; what `PageBooks.owner` holds
        self.parent: Node | None = None
        self.children: Node | None = None  # newest child; siblings are linked by next / prev
        self.next: Node | None = None
        self.prev: Node | None = None
        self.tokens = tokens
        self.depth = depth  # blocks from the root to the start of this run
        self.num_blocks = num_blocks
        self.pages: list[bytes] = []
        self.pins = 0
        self.live_children = 0
        self.priority = 0
        self.used = 0  # logical time of the last use
        self.queued = 0  # bit g: an entry for this node waits in group g's eviction order
        self.ghost = False
        self.stale = False  # the window or state a match at the end needs was evicted
        self.sealed = False  # a turn or prompt ended here: grow by a child, not in place

    def __lt__(self, other: Node) -> bool:
        return self.number < other.number

    def link(self, child: Node) -> None:
        """Put `child` first among the children."""
        child.parent, child.prev, child.next = self, None, self.children
        if self.children is not None:
            self.children.prev = child
        self.children = child
        if not child.ghost:
            self.live_children += 1

    def unlink(self, child: Node) -> None:
        """Take `child` out of the children."""
        if child.prev is None:
            self.children = child.next
        else:
            child.prev.next = child.next
        if child.next is not None:
            child.next.prev = child.prev
        child.prev = child.next = None
        if not child.ghost:
            self.live_children -= 1

    def kids(self) -> Iterator[Node]:
        """Children, newest first."""
        child = self.children
        while child is not None:
            following = child.next
            yield child
            child = following

    def path(self) -> list[Node]:
        """Runs from just below the root down to this one."""
        nodes: list[Node] = []
        node, parent = self, self.parent
        while parent is not None:
            nodes.append(node)
            node, parent = parent, parent.parent
        nodes.reverse()
        return nodes
