"""A naive prefix index: a dict from whole prefixes to the pages of their last block."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from kvtide.prefix import MirrorRule, StateRule, WindowRule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtide.pool import PageBooks
    from kvtide.prefix import Rule

Key: TypeAlias = tuple[str, tuple[int, ...]]
"""(scope, all tokens up to the end of a block)."""


class NaivePrefixes:
    """`pages[key][g]` is the page of group g that holds the block at the end of `key`, or -1."""

    def __init__(self, block_tokens: int, rules: Sequence[Rule | None]) -> None:
        self.block_tokens = block_tokens
        self.rules = rules
        self.pages: dict[Key, list[int]] = {}

    def keys(self, scope: str, tokens: Sequence[int], num_blocks: int) -> list[Key]:
        size = self.block_tokens
        return [(scope, tuple(tokens[: (i + 1) * size])) for i in range(num_blocks)]

    def forget_evicted(self, books: Sequence[PageBooks]) -> None:
        """Strike out what the books say the index no longer names."""
        for key, pages in list(self.pages.items()):
            for g, page in enumerate(pages):
                if page >= 0 and not books[g].owner[page]:
                    pages[g] = -1
            whole = [page for g, page in enumerate(pages) if self.lives_with_its_run(g)]
            if whole and -1 in whole:
                assert set(whole) == {-1}, "what lives with its run goes with its run"
                del self.pages[key]

    def lives_with_its_run(self, group: int) -> bool:
        rule = self.rules[group]
        return rule is None or isinstance(rule, MirrorRule)

    def hit_blocks(self, scope: str, tokens: Sequence[int]) -> int:
        """Most whole blocks all groups can use, one token left to compute."""
        keys = self.keys(scope, tokens, (len(tokens) - 1) // self.block_tokens)
        walk = next((i for i, key in enumerate(keys) if key not in self.pages), len(keys))
        held = [self.pages[key] for key in keys[:walk]]
        return max(b for b in range(walk + 1) if self._usable(held, b))

    def _usable(self, held: list[list[int]], blocks: int) -> bool:
        return all(self._allows(rule, [p[g] for p in held], blocks) for g, rule in self._sparse())

    def _sparse(self) -> list[tuple[int, Rule]]:
        return [(g, rule) for g, rule in enumerate(self.rules) if rule is not None]

    def _allows(self, rule: Rule, pages: list[int], blocks: int) -> bool:
        length = blocks * self.block_tokens
        match rule:
            case StateRule():
                return blocks == 0 or pages[blocks - 1] >= 0
            case MirrorRule(look_ahead):
                return blocks == 0 or length + look_ahead <= len(pages) * self.block_tokens
            case WindowRule(tokens, sinks):
                window = range(max(0, length - tokens + 1), length)
                read = [*range(min(sinks, length)), *window]
                return all(pages[position // self.block_tokens] >= 0 for position in read)

    def most_shared(self, scope: str, tokens: Sequence[int]) -> int:
        """Tokens shared with any prefix of the scope: no hit, partial or not, may be longer."""
        longest = 0
        for other_scope, other in self.pages:
            if other_scope == scope:
                same = [x == y for x, y in zip(other, tokens, strict=False)]
                longest = max(longest, same.index(False) if False in same else len(same))
        return min(longest, len(tokens) - 1)
