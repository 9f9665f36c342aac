"""Speculation: drafts are room, not history, until they are accepted."""

from __future__ import annotations

import numpy as np
import pytest
from tests.tiny import Rig, draft, full

from kvtide import CapacityError, UsageError
from kvtide.types import ABSENT


def test_sp_5_committing_the_newest_token_before_its_kv_exists() -> None:
    """The sampled token and rejected drafts are never part of what others can match."""
    rig = Rig(full(), pages=[8], max_tokens=16)
    a = rig.start(range(7), sample=True)
    assert (a.computed, a.length) == (7, 8)
    newest = a.tokens.tolist()
    assert rig.lookup([*newest, 99]) == 4
    rig.engine.step([a], 3, accepted=[1])  # the 8th token and two drafts, both rejected
    assert (a.computed, a.length) == (8, 9)
    assert rig.lookup([*newest, 99]) == 8
    rig.engine.step([a], 3, accepted=[1])  # rejected drafts beside the 9th token
    assert rig.lookup([*a.tokens.tolist(), 99]) == 8
    b = rig.start([*a.tokens[:9].tolist(), 99])
    assert b.hit == 8
    for _ in range(4):
        rig.engine.step([a], 4, accepted=[1])
        rig.kv.check()
    rig.kv.close([a, b])
    again = rig.start(a.saved.tolist() if len(a.saved) else range(1))
    rig.engine.verify([again])


@pytest.mark.parametrize(
    "specs", [(full(),), (full(), draft(3))], ids=["full", "with a draft pool"]
)
def test_sp_6_look_ahead_slots_missing_from_capacity_or_row_width(specs: tuple) -> None:
    """An engine that looks 3 + 1 tokens past 16 asks for rows of 20: five blocks, never exceeded.

    The manager adds nothing by itself: `max_tokens` is the longest it will ever hold, drafts
    included, and a step beyond it is refused before anything has changed.
    """
    rig = Rig(*specs, pages=[6] * len(specs), max_tokens=16 + 3 + 1)
    assert rig.kv.tables["full"].rows.shape[1] == 5
    a = rig.start(range(13), sample=True)
    while a.computed < 16:
        rig.engine.step([a], 1 + 3, accepted=[1])
        for table in rig.kv.tables.values():
            assert (table.rows[a.row] != ABSENT).sum() == -(-a.computed // 4)
    capacity = a.capacity
    assert rig.kv.extend([a], 4)
    assert a.capacity == 20
    with pytest.raises(CapacityError, match="21 tokens, max_tokens is 20"):
        rig.kv.extend([a], 5)
    rig.kv.check()
    rig.engine.step([a], 4, accepted=[1])
    assert a.capacity == capacity + 4
    rig.kv.close([a])
    assert rig.idle()


def test_accepted_drafts_become_known_and_computed_in_one_commit() -> None:
    """Two of three drafts are right: three tokens are computed, a fourth is sampled."""
    rig = Rig(full(), pages=[16], max_tokens=32)
    kv = rig.kv
    pair = [kv.open(list(range(5))), kv.open(list(range(100, 107)))]
    assert kv.admit(pair)
    with kv.step(pair, np.array([5, 7])):
        pass
    kv.commit(pair, [5, 107])
    assert kv.extend(pair, 4)  # the newest token and three drafts
    with kv.step(pair):
        pass
    drafts = np.array([[6, 7, 8, -1], [108, -1, -1, -1]])
    kv.commit(pair, drafts, accepted=np.array([3, 1]))
    assert [(s.computed, s.length) for s in pair] == [(8, 9), (8, 9)]
    assert pair[0].tokens.tolist() == list(range(9))
    assert pair[1].tokens.tolist() == list(range(100, 109))
    assert [s.capacity for s in pair] == [8, 8]  # the room of rejected drafts is given back
    kv.check()
    kv.close(pair)
    assert kv.open(list(range(9))).hit == 8
    assert kv.open([0, 1, 2, 3, 4, 5, 6, 7, 99]).hit == 8


@pytest.mark.parametrize(
    ("drafts", "accepted"),
    [([[6, 7, 8, 9]], 3), ([[6, -1, -1, -1]], 3), ([[-1, -1, -1, -1]], 3)],
    ids=["one too many", "drafts left out", "nothing known"],
)
def test_accepted_tokens_that_do_not_add_up_are_refused(
    drafts: list[list[int]], accepted: int
) -> None:
    """Nothing changes; the same commit with the right ids goes through."""
    rig = Rig(full(), pages=[16], max_tokens=32)
    seq = rig.start(range(5), sample=True)
    assert rig.kv.extend([seq], 4)
    with rig.kv.step([seq]):
        pass
    with pytest.raises(UsageError, match=r"5 tokens computed|8 tokens computed"):
        rig.kv.commit([seq], drafts, accepted=accepted)
    assert (seq.computed, seq.length) == (5, 6)
    rig.kv.commit([seq], [[6, 7, 8, -1]], accepted=3)
    assert (seq.computed, seq.length) == (8, 9)
    rig.kv.check()
