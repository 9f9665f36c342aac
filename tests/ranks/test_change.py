"""Changes and their words: what comes out went in, and what makes no sense never goes in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny import full, window

from kvtide import KVManager, Layout, Move, NullMemory, Options, UsageError
from kvtide.ranks import Change, Reason
from kvtide.ranks.change import MOST_MOVES, decode, encode, words_for

NAMES = ("full", "window_8", "state")
AGREED = "agreed"

COUNTS = st.integers(0, 2**40)
MOVES = st.builds(
    lambda pair, granules: Move(donor=pair[0], receiver=pair[1], granules=granules, reason=AGREED),
    st.permutations(NAMES),
    st.integers(1, 2**40),
)
PLANS = st.lists(MOVES, max_size=MOST_MOVES).map(tuple)
PAGES = st.dictionaries(st.sampled_from(NAMES), COUNTS, min_size=1)
CHANGES = st.one_of(
    st.builds(lambda pages: Change(pages=pages), PAGES),
    st.builds(lambda plan, n: Change(plan=plan, budget_bytes=n), PLANS, st.none() | COUNTS),
)


@given(CHANGES)
def test_words_become_the_same_change_again(change: Change) -> None:
    words = encode(change, NAMES)
    assert len(words) == words_for(len(NAMES))
    assert decode(words, NAMES) == change


def test_more_pools_than_a_plan_has_words_for_fit_too() -> None:
    names = tuple(f"pool{i}" for i in range(40))
    change = Change(pages={name: i for i, name in enumerate(names)})
    assert decode(encode(change, names), names) == change


def move(granules: int = 1, donor: str = "full", receiver: str = "state") -> Move:
    return Move(donor=donor, receiver=receiver, granules=granules, reason=AGREED)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (Change(), "empty"),
        (Change(pages={"full": 3}, budget_bytes=5), "make two"),
        (Change(pages={"full": 3}, plan=(move(),)), "make two"),
        (Change(pages={"fool": 3}), "pool 'fool' is unknown"),
        (Change(plan=(move(receiver="fool"),)), "pool 'fool' is unknown"),
        (Change(plan=(move(),) * (MOST_MOVES + 1)), "make several"),
        (Change(plan=(move(receiver="full"),)), "'full' to itself"),
        (Change(plan=(move(-1),)), "-1 granules"),
        (Change(plan=(move(0),)), "0 granules"),
        (Change(budget_bytes=-2), "-2 bytes of budget"),
        (Change(budget_bytes=1 << 64), "bytes of budget"),
        (Change(pages={"full": -1}), "-1 pages"),
    ],
)  # fmt: skip
def test_a_change_that_makes_no_sense_is_refused_before_others_hear_of_it(
    change: Change, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        change.require_for("tensor", NAMES)


@pytest.mark.parametrize("change", [Change(plan=(move(),)), Change(budget_bytes=1 << 20)])
def test_stages_of_a_pipeline_can_only_agree_on_pages(change: Change) -> None:
    change.require_for("tensor", NAMES)
    with pytest.raises(UsageError, match="pages"):
        change.require_for("pipeline", NAMES)
    Change(pages={"full": 3}).require_for("pipeline", NAMES)


def manager() -> KVManager:
    """Two pools of 32 granules, 4 pages each."""
    layout = Layout.from_layers({0: full(), 1: window(8)}, block_tokens=4)
    options = Options(mode="static", pool_ratio={"full": 0.5, "window_8": 0.5})
    return KVManager(layout, NullMemory(64 * 1024, 1024), max_tokens=32, options=options)


def test_what_cannot_be_done_is_refused_with_its_reason_and_numbers() -> None:
    kv = manager()
    before = kv.snapshot()
    least = Change(pages={"full": 1}).feasible(kv)
    assert (least.ready, least.reason, least.needed) == (False, Reason.FLOOR, 1)
    budget = Change(budget_bytes=1024).feasible(kv)
    assert (budget.ready, budget.reason, budget.needed) == (False, Reason.FLOOR, 1024)
    seqs = [kv.open(range(100 * i, 100 * i + 32)) for i in range(15)]
    seqs.append(kv.open(range(5000, 5024)))  # one page is left in either pool
    assert kv.admit(seqs)
    plan = (Move(donor="full", receiver="window_8", granules=5, reason=""),)
    pinned = Change(plan=plan).feasible(kv)
    assert (pinned.ready, pinned.reason, pinned.needed) == (False, Reason.PINNED, 5)
    assert pinned.available == 0
    assert {n: p.granules for n, p in before.pools.items()} == {
        n: p.granules for n, p in kv.snapshot().pools.items()
    }


def test_pages_are_offered_as_far_as_they_can_be_had() -> None:
    kv = manager()
    answer = Change(pages={"full": 100, "window_8": 200}).feasible(kv)
    assert answer.ready
    assert answer.offer is not None
    granted = decode(answer.offer, tuple(kv.pools)).pages
    assert granted["full"] == 100
    assert 127 < granted["window_8"] < 200  # what the fewer pages of the other leave
    Change(pages=granted).apply(kv)
    assert kv.resize(granted, dry_run=True) == granted
    with pytest.raises(UsageError, match="can have"):
        Change(pages={"full": 100, "window_8": 200}).apply(kv)
    kv.check()
