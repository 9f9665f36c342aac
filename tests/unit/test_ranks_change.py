"""Changes that can never be made are refused where they are proposed, on that rank alone."""

from __future__ import annotations

import pytest

from kvtide.errors import UsageError
from kvtide.ranks import Change
from kvtide.rebalance import Move

POOLS = ("full", "window_8")


def move(donor: str = "full", receiver: str = "window_8", granules: int = 1) -> Move:
    return Move(donor=donor, receiver=receiver, granules=granules, reason="test")


@pytest.mark.parametrize(
    ("change", "axis", "told"),
    [
        (Change(), "tensor", "the change is empty"),
        (Change(plan=(move(granules=0),)), "tensor", "granules from 'full' is 0; use 1 or more"),
        (Change(plan=(move(granules=-1),)), "tensor", "granules from 'full' is -1"),
        (Change(plan=(move(receiver="full"),)), "tensor", "from 'full' to itself"),
        (Change(plan=(move(donor="state"),)), "tensor", "pool 'state' is unknown; pools are full"),
        (Change(plan=(move(),) * 9), "tensor", "the plan has 9 moves, a ballot holds 8"),
        (Change(budget_bytes=-2), "tensor", "budget is -2; use 1 or more"),
        (Change(pages={"full": 0}), "pipeline", r"pages\['full'\] is 0; use 1 or more"),
        (Change(pages={"other": 3}), "pipeline", "pool 'other' is unknown"),
        (Change(plan=(move(),)), "pipeline", "give the change as pages"),
        (Change(budget_bytes=1), "pipeline", "give the change as pages"),
        (Change(pages={"full": 3}, budget_bytes=1), "tensor", "make two"),
    ],
)
def test_an_impossible_change_is_refused_with_its_numbers(
    change: Change, axis: str, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        change.require_for(axis, POOLS)  # type: ignore[arg-type]
