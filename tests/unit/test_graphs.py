"""Captured steps on the CPU twin: right bytes under the guard, wrong ones or a fault without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.graphs import Captured, NoGuard, NoStaging

from kvtide import StaleGraphError
from kvtide.testing.arenas import fate
from kvtide.testing.graphs import Copy
from kvtide.testing.places import WrongBytesError

if TYPE_CHECKING:
    from collections.abc import Callable

MOVES = (
    ("full", "state", 22),
    ("state", "full", 26),
    ("full", "window_8", 20),
    ("window_8", "state", 28),
    ("state", "full", 20),
)


@pytest.mark.parametrize("padding", [0, 3])
def test_replays_read_and_write_right_bytes_between_moves(padding: int) -> None:
    """Capture once, move granules and live pages in all directions, replay."""
    rig = Captured(padding=padding, num_rows=6)
    seqs, addresses = rig.scatter(), rig.addresses()
    for donor, receiver, granules in MOVES:
        epoch, (moved, _) = rig.kv.epoch, rig.kv.moved
        rig.move(donor, receiver, granules)
        rig.kv.settle()
        assert rig.kv.moved[0] > moved
        assert rig.kv.epoch > epoch
        rig.decode(seqs, 3)
        rig.kv.check()
    assert rig.kv.moved[1] > 0, "no live page had to move: this shows nothing"
    assert rig.addresses() == addresses


def test_a_move_asked_for_during_a_replay_waits() -> None:
    rig = Captured()
    seqs = rig.scatter()
    rig.twin.step(seqs)
    rig.twin.device.run(8)  # inputs and tables have been copied, some kernels have run
    assert rig.guard.num_in_flight == 1
    before = [table.rows[[s.row for s in seqs]].tolist() for table in rig.kv.tables.values()]
    assert rig.move("full", "state", 22).pending
    assert not rig.guard.quiesce()
    assert before == [t.rows[[s.row for s in seqs]].tolist() for t in rig.kv.tables.values()]
    assert rig.kv.moved[1] == 0
    checked = rig.twin.num_checked
    rig.twin.device.run()
    assert rig.twin.num_checked == checked + 4
    assert rig.guard.num_in_flight == 0
    assert rig.guard.quiesce()
    assert rig.kv.moved[1] > 0
    rig.decode(seqs, 3)


def test_a_move_of_live_pages_goes_on_where_a_step_begins_with_none_in_flight() -> None:
    """An engine that always has one in flight keeps its pages; once the device has caught up,
    they go as the next step begins.
    """
    rig = Captured()
    seqs = rig.scatter()
    rig.twin.step(seqs)
    rig.move("full", "state", 22)
    for _ in range(4):
        rig.twin.step(seqs)
        while rig.guard.num_in_flight > 1:
            rig.twin.device.run(1)
        assert rig.kv.snapshot().granules_pending > 0
        assert rig.kv.moved[1] == 0
    pending = rig.kv.snapshot().granules_pending
    rig.twin.device.run()
    rig.decode(seqs, 1)
    assert rig.kv.snapshot().granules_pending < pending
    assert rig.kv.moved[1] > 0
    rig.decode(seqs, 4)


@pytest.mark.parametrize("num_run", [5, 8])
def test_without_the_guard_the_same_move_pulls_the_pages_from_under_the_replay(
    num_run: int,
) -> None:
    """Negative control: its tables are on the device already, and nobody said it is in flight."""
    rig = Captured(guard=NoGuard)
    seqs = rig.scatter()
    rig.twin.step(seqs)
    rig.twin.device.run(num_run)
    rig.move_live_pages()
    assert fate(rig.twin.device.run) == "fault"


def baked(rig: Captured) -> tuple[Callable[[], bool], object]:
    """A graph that has the address of a live page baked in, as captured now: (replay, handle)."""
    (seq,) = rig.start()
    rig.decode([seq], 1)
    pool = rig.kv.pools["full"]
    page = int(rig.kv.tables["full"].rows[seq.row, 0])
    out = np.zeros(pool.page_bytes, np.uint8)
    copy = Copy(out.ctypes.data, pool.arena.base + page * pool.page_bytes, pool.page_bytes)
    copy()
    right = out.copy()
    assert right.any()

    def replay() -> bool:
        copy()
        if (out != right).any():
            raise WrongBytesError("the page is elsewhere")
        return True

    return replay, rig.guard.capture(4, bakes_pages=True)


def test_a_graph_with_page_ids_baked_in_is_refused_once_pages_have_moved() -> None:
    rig = Captured()
    seqs = rig.scatter()
    replay, handle = baked(rig)
    rig.guard.begin_step([], graph=handle)
    assert replay()
    rig.guard.end_step()
    captured, capture = rig.kv.epoch, rig.guard.capture(4)
    while fate(replay) == "":
        for donor, receiver in (("full", "state"), ("state", "full")):
            rig.move(donor, receiver, 22)
            rig.kv.settle()
    message = f"epoch {captured} baked in and pages have moved, the epoch is {rig.kv.epoch}.*again"
    with pytest.raises(StaleGraphError, match=message):
        rig.guard.begin_step(seqs, 1, graph=handle)
    assert rig.guard.num_in_flight == 0
    rig.guard.begin_step(seqs, 0, graph=capture)  # one that looks pages up is as good as ever
    rig.guard.end_step()
    rig.decode(seqs, 1)


def test_the_tables_of_a_step_are_its_own_until_its_fence() -> None:
    """Its device copies them late, after the next steps were planned over the same rows."""
    rig = Captured(num_rows=1)
    (first,) = rig.start()
    rig.decode([first], 5)
    rig.twin.step([first])
    rig.kv.close([first])
    (second,) = rig.start()
    assert second.row == 0
    for _ in range(6):
        rig.twin.step([second])
    assert rig.guard.num_in_flight == 7
    rig.twin.device.run()
    assert rig.twin.num_checked == 12


def test_live_tables_read_late_name_the_next_steps_pages() -> None:
    """Negative control: the same schedule, the device copying from the page tables themselves."""
    rig = Captured(num_rows=1, guard=NoStaging)
    (first,) = rig.start()
    rig.decode([first], 2)
    rig.twin.step([first])
    rig.kv.close([first])
    (second,) = rig.start()
    rig.twin.step([second])
    assert fate(rig.twin.device.run) == "WrongBytesError"
