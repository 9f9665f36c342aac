"""A rank is killed, or stopped where it stands, in every phase: all others end, with an error."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from tests.ranks_processes.losing import DEADLINE

if TYPE_CHECKING:
    from tests.ranks_processes.host import Host

PHASES = (
    "before the cast",
    "between cast and conclusion",
    "preparing",
    "voting",
    "draining",
    "applying 1",
    "applying 3",
)
"""Applying: at the so manieth map or unmap."""

_SLACK = 8.0
"""Seconds that a rank may take beyond the deadline: naming who is lost, on a busy machine."""


def survivors(host: Host, case: str, victim: int, **how: Any) -> list[dict[str, Any]]:
    """What two of three ranks told; all but the victim must have ended by themselves."""
    outcomes = host.run(case, 3, limit=60, victims=(victim,), victim=victim, **how)
    assert outcomes[victim].told == {}, "the victim came to an end: it was not lost"
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    for outcome in others:
        assert outcome.code == 0, outcome.stderr
        assert outcome.told["error"] in ("RankLostError", "RankFailedError"), outcome.told
        assert outcome.told["seconds"] < DEADLINE + _SLACK
    return [outcome.told for outcome in others]


def require_whole(others: list[dict[str, Any]]) -> None:
    """Books and bytes were audited by the ranks themselves. A change was made whole or not at all,
    and one rank has made at most one more than the other.
    """
    for told in others:
        assert told["same"], "the group did not stay stopped"
        assert told["pages"] == told["applied"][-1]
        assert len(told["applied"]) > 3
    short, *_, long = sorted((told["applied"] for told in others), key=len)
    assert long[: len(short)] == short
    assert len(long) - len(short) <= 1


def names(text: str, rank: int) -> bool:
    """Whether a message names this rank among those not heard; a slow one may be named as well."""
    heard_of = re.search(r"ranks? ([\d, ]+) (was|were) not heard", text)
    return heard_of is not None and str(rank) in heard_of[1].split(", ")


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("when", PHASES)
def test_a_lost_rank_ends_the_others_in_time_with_whole_pools(
    host: Host, when: str, how: str
) -> None:
    others = survivors(host, "lose", 1, when=when, how=how)
    require_whole(others)
    assert all(names(told["text"], 1) for told in others), others


@pytest.mark.parametrize("when", ["before the cast", "applying 1"])
def test_a_rank_that_wakes_up_when_the_others_are_gone_ends_as_well(host: Host, when: str) -> None:
    how = {"victim": 1, "when": when, "how": "SIGSTOP"}
    outcomes = host.run("lose", 3, limit=60, victims=(1,), wakes=True, **how)
    for outcome in outcomes:
        assert outcome.code == 0, outcome.stderr
        assert outcome.told["error"] in ("RankLostError", "RankFailedError"), outcome.told
    require_whole([outcome.told for outcome in outcomes])


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_rank_lost_while_quotas_are_agreed_on_ends_the_others(host: Host, how: str) -> None:
    for told in survivors(host, "lose_at_start", 1, how=how):
        assert names(told["text"], 1), told


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_losing_the_rank_that_serves_the_store_ends_the_others_too(host: Host, how: str) -> None:
    """Its store answers nothing any more, and a question to it may take minutes."""
    others = survivors(host, "lose", 0, when="voting", how=how, store="tcp")
    require_whole(others)
