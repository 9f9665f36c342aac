"""A naive model of what may match: every prefix ever computed in a scope, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtide import Scope


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens two sequences share from their start."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


class NaiveMatches:
    """What was computed (an upper bound of a hit) and what was surely published (a lower one)."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._computed: dict[Scope, set[tuple[int, ...]]] = {}
        self._published: dict[Scope, set[tuple[int, ...]]] = {}

    def computed(self, scope: Scope, tokens: Iterable[int]) -> None:
        self._computed.setdefault(scope, set()).add(tuple(tokens))

    def published(self, scope: Scope, tokens: Sequence[int]) -> None:
        whole = len(tokens) // self.block_tokens * self.block_tokens
        self._published.setdefault(scope, set()).add(tuple(tokens[:whole]))

    def reset(self) -> None:
        self._computed.clear()
        self._published.clear()

    def most(self, scope: Scope, tokens: Sequence[int]) -> int:
        """No hit may be longer: the longest prefix anyone computed, one token left to compute."""
        longest = max((common(t, tokens) for t in self._computed.get(scope, ())), default=0)
        return min(longest, len(tokens) - 1)

    def least(self, scope: Scope, tokens: Sequence[int]) -> int:
        """Where nothing was evicted and all groups are full: whole blocks of what was published."""
        longest = max((common(t, tokens) for t in self._published.get(scope, ())), default=0)
        usable = min(longest, len(tokens) - 1)
        return usable // self.block_tokens * self.block_tokens
