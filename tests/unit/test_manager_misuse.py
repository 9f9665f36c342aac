"""Misuse of the manager's verbs is refused loudly and changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.tiny import Rig, full, state, window

from kvtide import Move, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide import Sequence


@pytest.fixture
def rig() -> Rig:
    return Rig(full(), state(), window(), pages=[12, 6, 12], max_tokens=24)


@pytest.mark.parametrize("verb", ["admit", "resume", "batch", "extend", "suspend"])
def test_a_sequence_named_twice_is_refused(rig: Rig, verb: str) -> None:
    seq = rig.kv.open(range(6)) if verb == "admit" else rig.start(range(6))
    if verb == "resume":
        rig.kv.suspend([seq])
    before = rig.books(), seq.status
    with pytest.raises(UsageError, match="twice"):
        getattr(rig.kv, verb)([seq, seq])
    assert (rig.books(), seq.status) == before
    rig.kv.check()


CALLS: dict[str, Callable[[Rig, Sequence], object]] = {
    "chunk": lambda rig, seq: rig.kv.chunk(seq, 4),
    "batch": lambda rig, seq: rig.kv.batch([seq]),
    "extend": lambda rig, seq: rig.kv.extend([seq], 1),
    "trim": lambda rig, seq: rig.kv.trim(seq, 1),
    "fork": lambda rig, seq: rig.kv.fork(seq),
    "suspend": lambda rig, seq: rig.kv.suspend([seq]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_verbs_for_admitted_sequences_refuse_others(
    rig: Rig, call: Callable[[Rig, Sequence], object]
) -> None:
    seq = rig.kv.open(range(6))
    with pytest.raises(UsageError, match="is open; this needs one that is admitted"):
        call(rig, seq)
    rig.kv.close([seq])
    with pytest.raises(UsageError, match="is closed; this needs one that is admitted"):
        call(rig, seq)
    with pytest.raises(UsageError, match="is closed; this needs one that is open or suspended"):
        rig.kv.admit([seq])


@pytest.mark.parametrize("num_tokens", [0, -1, 7])
def test_admit_takes_a_count_of_known_tokens(rig: Rig, num_tokens: int) -> None:
    seq = rig.kv.open(range(6))
    with pytest.raises(UsageError, match=f"num_tokens is {num_tokens}; .* 6 tokens, admit 1 to 6"):
        rig.kv.admit([seq], num_tokens)


def test_one_count_for_each_sequence(rig: Rig) -> None:
    seqs = [rig.kv.open(range(6)), rig.kv.open(range(5))]
    with pytest.raises(UsageError, match="1 counts for 2 sequences"):
        rig.kv.admit(seqs, [3])


@pytest.mark.parametrize("accepted", [-1, 3, 9])
def test_no_more_is_accepted_than_was_granted(accepted: int) -> None:
    rig = Rig(full(), pages=[8], max_tokens=24)
    seq = rig.kv.open(range(12))
    assert rig.kv.admit([seq], 4)
    batch = rig.kv.batch([seq])
    assert rig.kv.extend(batch, 2)
    with pytest.raises(UsageError, match=rf"accepted is {accepted}.* 2 tokens were granted"):
        rig.kv.commit(batch, accepted=np.array([accepted]))
    assert seq.computed == 0
    rig.kv.commit(batch, accepted=np.array([2]))
    assert seq.computed == 2
    rig.kv.check()


def test_nothing_is_accepted_without_a_grant() -> None:
    rig = Rig(full(), pages=[8], max_tokens=24)
    seq = rig.start(range(4), sample=True)
    batch = rig.kv.batch([seq])
    with pytest.raises(UsageError, match="nothing was granted"):
        rig.kv.commit(batch, accepted=1)
    with pytest.raises(UsageError, match="nothing was granted"):
        rig.kv.commit(batch)


def test_commit_takes_no_more_than_is_known(rig: Rig) -> None:
    seq = rig.start(range(6))
    batch = rig.kv.batch([seq])
    assert rig.kv.extend(batch, 2)
    with pytest.raises(UsageError, match="8 tokens computed but only 6 are known"):
        rig.kv.commit(batch)
    assert seq.computed == 6


def test_a_sampled_token_follows_the_last_known_one(rig: Rig) -> None:
    seq = rig.kv.open(range(6))
    assert rig.kv.admit([seq])
    batch = rig.kv.batch([seq])
    assert rig.kv.extend(batch, 4)
    with pytest.raises(UsageError, match=r"must follow the last known one"):
        rig.kv.commit(batch, [7])
    with pytest.raises(UsageError, match=r"shape \[2\] for 1 sequences"):
        rig.kv.commit(batch, [7, 7])
    assert (seq.computed, seq.length) == (0, 6)


def test_commit_wants_the_list_that_ran(rig: Rig) -> None:
    a, b = rig.start(range(6), sample=True), rig.start(range(9), sample=True)
    assert rig.kv.extend([a, b], 1)
    with pytest.raises(UsageError, match="other sequences than the last extend or step"):
        rig.kv.commit([b, a])
    with rig.kv.step([a, b]):
        pass
    rig.kv.commit([a, b])
    assert (a.computed, b.computed) == (7, 10)


def test_a_batch_ends_with_its_sequences(rig: Rig) -> None:
    a, b = rig.start(range(6), sample=True), rig.start(range(9), sample=True)
    batch = rig.kv.batch([a, b])
    rig.kv.suspend([b])
    with pytest.raises(UsageError, match="closed or suspended; make a new batch"):
        rig.kv.extend(batch, 1)
    assert rig.kv.resume([b])
    with pytest.raises(UsageError, match="closed or suspended; make a new batch"):
        rig.kv.extend(batch, 1)


@pytest.mark.parametrize("num", [-1, 6, 7])
def test_trim_leaves_at_least_one_token(rig: Rig, num: int) -> None:
    seq = rig.start(range(6))
    with pytest.raises(UsageError, match=f"cannot trim {num} of 6 tokens; one must stay"):
        rig.kv.trim(seq, num)


def test_a_state_cannot_rewind(rig: Rig) -> None:
    seq = rig.start(range(6), sample=True)
    rig.kv.trim(seq, 1)  # known, not computed
    with pytest.raises(UsageError, match=r"'state' holds a state after 6 tokens.* rewind to 5"):
        rig.kv.trim(seq, 1)
    assert (seq.computed, seq.length) == (6, 6)


def test_a_window_that_has_passed_cannot_come_back() -> None:
    rig = Rig(full(), window(4), pages=[8, 8], max_tokens=24)
    seq = rig.start(range(12))
    with pytest.raises(UsageError, match="'window_4' has released pages that 8 tokens need"):
        rig.kv.trim(seq, 4)
    rig.kv.trim(seq, 1)
    rig.engine.verify([seq])


def test_a_plan_names_two_pools_that_exist(rig: Rig) -> None:
    with pytest.raises(UsageError, match="from 'full' to itself"):
        rig.kv.rebalance((Move(donor="full", receiver="full", granules=1, reason=""),))
    with pytest.raises(UsageError, match="names pool 'host'; pools are full, state, window_8"):
        rig.kv.rebalance((Move(donor="full", receiver="host", granules=1, reason=""),))


def test_a_grant_outlives_neither_trim_nor_fork() -> None:
    """What extend promised is checked again where pages were given back or shared since."""
    rig = Rig(full(), window(), pages=[12, 12], max_tokens=24)
    seq = rig.start(range(8), sample=True)
    for disturb in (lambda: rig.kv.trim(seq, 5), lambda: rig.kv.fork(seq)):
        batch = rig.kv.batch([seq])
        assert rig.kv.extend(batch, 1)
        disturb()  # trim gives back the very page that was granted
        with rig.kv.step(batch) as step:
            assert seq.capacity >= seq.computed + int(step.num_new[0])
            rig.kv.check()
        rig.kv.commit(batch, accepted=0)


def test_a_fork_between_grant_and_step_does_not_share_the_state() -> None:
    rig = Rig(full(), state(), pages=[12, 6], max_tokens=24)
    seq = rig.start(range(6), sample=True)
    batch = rig.kv.batch([seq])
    assert rig.kv.extend(batch, 1)
    child = rig.kv.fork(seq)
    assert child is not None
    with rig.kv.step(batch):
        rows = rig.kv.tables["state"].rows
        assert rows[seq.row, 0] != rows[child.row, 0]
    rig.engine.verify([child])
