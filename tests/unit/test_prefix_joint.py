"""The joint rule: how much of a path all layer groups can use together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvtide.pool import Fences, PageBooks
from kvtide.prefix import (
    MirrorRule,
    Prefixes,
    PrefixTree,
    Rule,
    StateRule,
    WindowRule,
    longest_hit,
)
from kvtide.types import Scope

B = 4


def mask(pattern: str) -> npt.NDArray[np.bool_]:
    """One character a block: `x` is there, `.` is not."""
    return np.array([c == "x" for c in pattern], np.bool_)


def hit(*needs: tuple[Rule, str]) -> int:
    num = len(needs[0][1]) if needs else 5
    return longest_hit(num, [(rule, mask(pattern)) for rule, pattern in needs])


def test_without_rules_all_blocks_of_the_walk_count() -> None:
    assert hit() == 5
    assert longest_hit(0, []) == 0


@pytest.mark.parametrize(
    ("window", "pattern", "blocks"),
    [
        (8, "xxxx", 4),
        (8, "..xx", 4),  # tokens 9..15 stand in blocks 2 and 3
        (8, ".x.x", 0),
        (8, "xx.x", 2),
        (8, "xxx.", 3),
        (8, "....", 0),
        (9, "..xx", 4),  # 8..15: block 2 from its first token on
        (10, "..xx", 0),  # 7..15: one token of block 1
        (4, "...x", 4),
        (5, "...x", 4),  # 12..15 exactly
        (6, "...x", 0),
        (1, "....", 4),  # a window of one token reads no past
        (2, "...x", 4),
        (100, "xxx.", 3),
        (100, ".xxx", 0),
    ],
)
def test_a_window_needs_its_last_tokens_without_a_hole(
    window: int, pattern: str, blocks: int
) -> None:
    assert hit((WindowRule(window, 0, B), pattern)) == blocks


@pytest.mark.parametrize(
    ("sinks", "pattern", "blocks"),
    [(1, "x..x", 4), (4, "x..x", 4), (5, "x..x", 1), (5, "xx.x", 4), (1, "...x", 0)],
)
def test_sinks_are_needed_as_far_as_the_hit_reaches(sinks: int, pattern: str, blocks: int) -> None:
    assert hit((WindowRule(4, sinks, B), pattern)) == blocks


def test_sinks_are_needed_even_where_the_window_reads_no_past() -> None:
    assert hit((WindowRule(1, 5, B), "x...")) == 1
    assert hit((WindowRule(1, 5, B), "xx..")) == 4


@pytest.mark.parametrize(
    ("pattern", "blocks"), [("....", 0), ("x...", 1), (".x..", 2), ("x..x", 4), ("xxx.", 3)]
)
def test_a_state_needs_a_snapshot_at_the_very_boundary(pattern: str, blocks: int) -> None:
    assert hit((StateRule(), pattern)) == blocks


@pytest.mark.parametrize(
    ("look_ahead", "pattern", "blocks"),
    [(0, "xxxx", 4), (1, "xxxx", 3), (4, "xxxx", 3), (5, "xxxx", 2), (16, "xxxx", 0), (1, "x", 0)],
)
def test_a_mirror_computes_its_last_tokens_again(
    look_ahead: int, pattern: str, blocks: int
) -> None:
    assert hit((MirrorRule(look_ahead, B), pattern)) == blocks


def test_a_mirror_has_no_holes() -> None:
    assert hit((MirrorRule(0, B), "xx.x")) == 2


def test_all_rules_hold_at_once() -> None:
    """The longest length that suits everyone, not the minimum of what suits each."""
    window, state = WindowRule(5, 0, B), StateRule()
    assert hit((window, "xxx.x"), (state, ".x.x.")) == 2
    assert hit((window, "..xxx"), (state, ".x.x.")) == 4
    assert hit((window, "..xxx"), (state, ".x...")) == 0
    assert hit((MirrorRule(1, B), "xxxxx"), (state, "xx..x")) == 2


@pytest.mark.parametrize("window", range(1, 14))
@pytest.mark.parametrize("length", range(40))
def test_the_widest_window_over_all_alignments(window: int, length: int) -> None:
    """`max_blocks` is what a sequence holds at most while it decodes: what it may read next and
    the block it writes to.
    """
    rule = WindowRule(window, 0, B)
    reads_and_writes = {p // B for p in range(max(0, length - window + 1), length + 1)}
    assert rule.first_block(length) == min(reads_and_writes)
    assert len(reads_and_writes) <= rule.max_blocks


@pytest.mark.parametrize("window", range(1, 14))
def test_the_widest_window_is_reached(window: int) -> None:
    rule = WindowRule(window, 0, B)
    widths = [n // B - rule.first_block(n) + 1 for n in range(40)]
    assert max(widths) == rule.max_blocks


@pytest.mark.parametrize(
    ("rule", "depth", "blocks", "kept"),
    [
        (WindowRule(8, 0, B), 0, 5, ["...xx"]),
        (WindowRule(8, 0, B), 7, 1, ["x"]),  # the window reaches beyond the run's start
        (WindowRule(4, 6, B), 0, 5, ["xx..x"]),
        (WindowRule(4, 6, B), 1, 5, ["x...x"]),  # of two sink blocks one is in this run
        (WindowRule(4, 6, B), 2, 5, ["....x"]),
        (StateRule(), 3, 4, ["...x"]),
    ],
)
def test_what_a_run_keeps_serves_a_match_at_its_end(
    rule: WindowRule | StateRule, depth: int, blocks: int, kept: list[str]
) -> None:
    sinks, start = rule.kept_span(depth, blocks)
    span = ["x" if i < sinks or i >= start else "." for i in range(blocks)]
    assert "".join(span) == kept[0]


def index(*rules: Rule | None) -> tuple[Prefixes, PrefixTree]:
    """An index of one cached block [1, 2, 3, 4] for groups with these rules."""
    tree = PrefixTree(B, len(rules))
    books = [PageBooks(8, Fences()) for _ in rules]
    pages = []
    for one in books:
        one.create(np.arange(8, dtype=np.int32))
        got = one.take(1)
        assert got is not None
        pages.append(got)
    prefixes = Prefixes(tree, books, rules, partial=True)
    root = tree.root(Scope())
    root.pins += 1
    prefixes.publish(root, np.array([1, 2, 3, 4], np.int32).tobytes(), pages)
    return prefixes, tree


@pytest.mark.parametrize(
    ("rules", "tokens"),
    [
        ((None,), 3),
        ((None, WindowRule(2, 0, B)), 3),
        ((None, MirrorRule(0, B)), 3),
        ((None, MirrorRule(1, B)), 0),  # what a drafter wrote there looked at what follows
        ((None, MirrorRule(3, B)), 0),
    ],
)
def test_part_of_a_block_is_reused_where_no_rule_backs_off(
    rules: tuple[Rule | None, ...], tokens: int
) -> None:
    prefixes, tree = index(*rules)
    data = np.array([1, 2, 3, 9, 9, 9], np.int32)
    assert prefixes.match(tree.root(Scope()), data.tobytes(), len(data)).hit == tokens
