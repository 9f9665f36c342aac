"""Finding the child of a run by its first block. A key only finds the candidate; tokens decide."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtide.prefix.node import Node
    from kvtide.types import KeyFunction


def default_key(parent_number: int, block: bytes) -> int:
    """Key of a child: any function will do, a collision costs one comparison."""
    return hash((parent_number, block))


class ChildIndex:
    """All children of all runs in one dictionary: about 70 bytes a run, where one each takes 200.

    Nodes whose keys collide wait in lists beside it. `num_collisions` counts look-ups that met a
    node with the right key and the wrong tokens.
    """

    __slots__ = ("_block_bytes", "_collided", "_key", "_nodes", "num_collisions")

    def __init__(self, block_bytes: int, key: KeyFunction) -> None:
        self.num_collisions = 0
        self._block_bytes = block_bytes
        self._key = key
        self._nodes: dict[int, Node] = {}
        self._collided: dict[int, list[Node]] = {}

    def find(self, parent: Node, block: bytes) -> Node | None:
        """The child of `parent` whose run begins with `block`."""
        key = self._key(parent.number, block)
        found = self._nodes.get(key)
        if found is None or (found.parent is parent and found.tokens.startswith(block)):
            return found
        self.num_collisions += 1
        for other in self._collided.get(key, ()):
            if other.parent is parent and other.tokens.startswith(block):
                return other
        return None

    def add(self, node: Node) -> None:
        """`node` hangs under its parent now."""
        key = self._key_of(node)
        if self._nodes.setdefault(key, node) is not node:
            self._collided.setdefault(key, []).append(node)

    def remove(self, node: Node) -> None:
        """`node` is about to leave its parent."""
        key = self._key_of(node)
        others = self._collided.get(key)
        if self._nodes.get(key) is node:
            if others:
                self._nodes[key] = others.pop(0)
            else:
                del self._nodes[key]
        elif others:
            others.remove(node)
        if others is not None and not others:
            del self._collided[key]

    def _key_of(self, node: Node) -> int:
        assert node.parent is not None
        return self._key(node.parent.number, node.tokens[: self._block_bytes])

    def clear(self) -> None:
        """Forget every run."""
        self._nodes.clear()
        self._collided.clear()
