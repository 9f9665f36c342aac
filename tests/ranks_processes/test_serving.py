"""Ranks in processes of their own, over gloo, that serve and change capacity; bytes are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.ranks_processes.host import Host, Outcome

DIRECTIONS = {
    f"{donor} > {receiver}"
    for donor in ("full", "window_8", "state")
    for receiver in ("full", "window_8", "state", None)
    if donor != receiver
}
"""None: to the system, under a smaller budget."""


def told(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """What every rank told; all must have come to their end."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0, f"rank {rank} ended with {outcome.code}\n{outcome.stderr}"
    return [outcome.told for outcome in outcomes]


def require_equal(ranks: list[dict[str, Any]], *names: str) -> None:
    for name in names:
        assert all(rank[name] == ranks[0][name] for rank in ranks), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "mode", "commits"),
    [(2, "replicated", 1000), (2, "leader", 100), (4, "replicated", 60), (4, "leader", 60)],
)
def test_ranks_stay_equal_through_changes_in_all_directions_under_load(
    host: Host, size: int, mode: str, commits: int
) -> None:
    ranks = told(host.run("serve", size, limit=240, mode=mode, commits=commits))
    require_equal(ranks, "digests", "finished", "pages", "granules", "trades", "evicted")
    first = ranks[0]
    assert first["facts"]["commits"] >= commits
    assert first["under_load"] >= commits * 0.95
    assert set(first["trades"]) == DIRECTIONS
    assert first["relocated"] > 0
    assert first["waits"] > 0, "memory was never short: that was no load"
    (alone,) = told(host.run("alone", 1, requests=first["opened"]))
    assert len(alone["finished"]) == first["opened"]
    assert first["finished"] == alone["finished"]


def test_a_slow_rank_slows_the_others_down_and_that_is_all(host: Host) -> None:
    ranks = told(host.run("serve", 2, mode="replicated", commits=10, every=2, nap=0.02))
    require_equal(ranks, "digests", "finished", "pages")
    assert ranks[0]["facts"]["commits"] >= 10


def test_ranks_with_different_memory_left_start_with_equal_pools(host: Host) -> None:
    ranks = told(host.run("start", 2))
    require_equal(ranks, "digests", "finished", "pages", "bytes", "agreed", "granted")
    for rank in ranks:
        assert (rank["gib"], rank["outcome"]) == (220, "shrink")
        assert rank["agreed"] == rank["granted"]
        assert rank["refusal"] == ""
        assert rank["pages"]["full"] == rank["agreed"]["full"] - 4


def test_ranks_with_different_layouts_do_not_start(host: Host) -> None:
    for rank in told(host.run("start_apart", 3)):
        assert rank["error"] == "DivergenceError"
        assert "fingerprint" in rank["text"]
        assert all(f"{r}: " in rank["text"] for r in range(3))


def test_one_rank_that_says_no_keeps_all_as_they_are(host: Host) -> None:
    ranks = told(host.run("refuse", 2))
    require_equal(ranks, "digests", "pages", "refusals")
    for rank in ranks:
        assert rank["refusals"] == ["veto", ""]
        assert rank["kept"]
        assert rank["pages"] == rank["wanted"]


def test_one_rank_whose_memory_refuses_what_all_agreed_on_stops_all(host: Host) -> None:
    *others, short = told(host.run("run_short", 3))
    assert short["error"] == "RanksError"
    assert "rank 2" in short["text"]
    assert short["pages"] == short["before"]
    for rank in others:
        assert rank["error"] == "RankFailedError"
        assert "rank 2 has stopped: [Errno 12]" in rank["text"]
        assert rank["pages"] == rank["wanted"]
        assert rank["seconds"] < 20, "the deadline of 60 s was waited for"
    assert all(rank["same"] for rank in (*others, short))


def test_books_that_differ_stop_all_ranks_at_that_tick_with_every_ranks_values(host: Host) -> None:
    ranks = told(host.run("differ", 3))
    require_equal(ranks, "error", "text", "at", "digests")
    for rank in ranks:
        assert rank["error"] == "DivergenceError"
        # Step 20's sequence is in the ballot cast at boundary 21, which is concluded at the next.
        assert (rank["text"].split(" ranks differ")[0], rank["at"]) == ("at tick 21", 22)
        assert "by rank sequences' lengths: {0: " in rank["text"]
        assert all(f"{r}: " in rank["text"] for r in range(3))
        assert rank["same"]
        assert rank["anew"] == "", "a new group of the same processes could not begin"


def test_a_group_that_was_given_up_leaves_nothing_for_the_next_one(host: Host) -> None:
    ranks = told(host.run("restart", 3))
    require_equal(ranks, "anew", "digests")
    assert ranks[0]["anew"] == ""
    for rank in ranks[1:]:
        assert rank["error"] == "RankFailedError"
        assert "rank 0 has stopped: told to" in rank["text"]


def test_a_pipeline_changes_pages_only_when_its_ring_is_empty_and_all_stages_agree(
    host: Host,
) -> None:
    """Four stages with other bytes a page each, and up to four micro-batches in flight."""
    ranks = told(host.run("ring", 4, changes=50))
    require_equal(ranks, "tables", "digests", "finished", "pages")
    assert [rank["most"] for rank in ranks] == [1, 2, 3, 4]
    for rank in ranks:
        assert rank["made"] == rank["facts"]["commits"] >= 50
        assert rank["relocated"] > 0
    granules = [rank["granules"]["full"] for rank in ranks]
    assert len(set(granules)) == 4, "the stages' pages were to have different bytes"
    splits = [pages for pages, _ in ranks[0]["tables"]]
    assert len({tuple(pages.values()) for pages in splits}) > 25


def test_data_parallel_ranks_pause_at_the_same_steps_and_each_makes_its_own_change(
    host: Host,
) -> None:
    ranks = told(host.run("pause", 2))
    require_equal(ranks, "pauses")
    assert len(ranks[0]["pauses"]) > 20
    for rank in ranks:
        assert set(rank["applied"]) <= set(rank["pauses"])
        assert len(rank["applied"]) >= 5
    assert ranks[0]["applied"] != ranks[1]["applied"]
    assert ranks[0]["pages"] != ranks[1]["pages"]
