"""Ballots and their fold, against the plain smallest and largest of what ranks said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.ranks.ballot import Ballot, Reason, Shape, Tally, Vote, fold

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = Shape(facts=2, payload=3)
NUMBERS = st.integers(-(2**62), 2**62)
COUNTS = st.integers(0, 2**62)
PAYLOADS = st.none() | st.tuples(NUMBERS, NUMBERS, NUMBERS)

BALLOTS = st.builds(
    Ballot,
    tick=COUNTS,
    phase=st.integers(0, 2),
    epoch=COUNTS,
    facts=st.tuples(NUMBERS, NUMBERS),
    vote=st.sampled_from(Vote),
    reason=st.sampled_from(Reason),
    needed=COUNTS,
    available=COUNTS,
    wants=st.booleans(),
    in_flight=COUNTS,
    completed=COUNTS,
    trouble=st.sampled_from(Reason),
    proposal=PAYLOADS,
    offer=PAYLOADS,
)


def tally_of(ballots: list[Ballot]) -> Tally:
    return Tally(fold([ballot.pack(SHAPE) for ballot in ballots]), SHAPE)


def by_word(given: list[tuple[int, ...]], choose: Callable[..., int]) -> list[int]:
    return [choose(words) for words in zip(*given, strict=True)]


@given(st.lists(BALLOTS, min_size=1, max_size=5))
def test_a_tally_has_the_smallest_and_largest_of_every_word(ballots: list[Ballot]) -> None:
    tally = tally_of(ballots)
    for word in (
        "tick", "phase", "epoch", "vote", "reason", "needed", "wants", "in_flight", "completed",
        "trouble",
    ):  # fmt: skip
        said = [int(getattr(ballot, word)) for ballot in ballots]
        found = getattr(tally, word)
        assert (found.low, found.high) == (min(said), max(said)), word
        assert found.is_equal == (len(set(said)) == 1)
    made = [ballot.proposal is not None for ballot in ballots]
    assert (tally.proposes.low, tally.proposes.high) == (min(made), max(made))
    facts = [ballot.facts for ballot in ballots]
    assert [word.low for word in tally.facts] == by_word(facts, min)
    assert [word.high for word in tally.facts] == by_word(facts, max)


@given(st.lists(BALLOTS, min_size=1, max_size=5))
def test_ranks_that_say_nothing_change_no_proposal_and_no_offer(ballots: list[Ballot]) -> None:
    tally = tally_of(ballots)
    proposals = [ballot.proposal for ballot in ballots if ballot.proposal is not None]
    if proposals:
        assert [word.low for word in tally.proposal] == by_word(proposals, min)
        assert [word.high for word in tally.proposal] == by_word(proposals, max)
    offers = [ballot.offer for ballot in ballots if ballot.offer is not None]
    if offers:
        assert tally.least_offer == tuple(by_word(offers, min))
    else:
        assert tally.least_offer is None
    refusals = [ballot.available for ballot in ballots if ballot.vote is Vote.REFUSED]
    if refusals:  # what is left is of interest only where it was too little
        assert tally.available.low == min(refusals)


@given(st.lists(BALLOTS, min_size=2, max_size=5), st.randoms())
def test_the_order_and_grouping_of_a_fold_do_not_matter(
    ballots: list[Ballot], random: object
) -> None:
    packed = [ballot.pack(SHAPE) for ballot in ballots]
    shuffled = list(packed)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    in_pairs = fold([fold(shuffled[:2]), *shuffled[2:]])
    np.testing.assert_array_equal(fold(packed), in_pairs)
    assert len(packed[0]) == 2 * SHAPE.words


def test_a_tally_knows_only_the_words_of_a_ballot() -> None:
    tally = tally_of([Ballot(tick=0, phase=0, epoch=0, facts=(1, 2))])
    with pytest.raises(AttributeError, match="colour"):
        _ = tally.colour
