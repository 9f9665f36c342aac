"""What moved and why: counted, told to the events sink, logged."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvtide.events import GroundMoved
from kvtide.rebalance.decide import Move

if TYPE_CHECKING:
    from kvtide.events import Sink
    from kvtide.prefix.eviction import Offer
    from kvtide.rebalance.decide import Plan

Cause: TypeAlias = Literal["idle", "price", "demand", "plan", "budget"]
"""idle: another pool had it free, unused lately; price: another pool's cached pages were
worth less; demand: live sequences had nothing left to drop; plan: somebody asked for it; budget:
the whole tier shrinks."""

_log = logging.getLogger("kvtide.rebalance")


class Journal:
    """Counts by cause; tells the sink and the log in words."""

    def __init__(self, names: list[str], events: Sink | None) -> None:
        self._names = names
        self._events = events
        self.num_moved: dict[Cause, int] = {
            "idle": 0,
            "price": 0,
            "demand": 0,
            "plan": 0,
            "budget": 0,
        }
        """Granules that left a pool for another (for the system: budget), by cause."""

        self.num_declined = 0
        """Granules that a dry run would have begun to move."""
        self._wishes: dict[tuple[int, int], int] = {}

    @property
    def total(self) -> int:
        """Granules moved for any cause."""
        return sum(self.num_moved.values())

    @property
    def is_read(self) -> bool:
        """Whether anybody wants reasons in words: they cost more than a count."""
        return self._events is not None or _log.isEnabledFor(logging.DEBUG)

    def note(
        self, donor: int, receiver: int | None, granules: int, cause: Cause, reason: str
    ) -> None:
        """Granules went from `donor` to `receiver` (None: to the system)."""
        self.num_moved[cause] += granules
        if self.is_read:
            self._tell(donor, receiver, granules, cause, reason)

    def decline(self, donor: int, receiver: int, granules: int, reason: str) -> None:
        """A dry run: granules would have gone from `donor` to `receiver` by price."""
        self.num_declined += granules
        pair = (donor, receiver)
        self._wishes[pair] = max(granules, self._wishes.get(pair, 0))
        if self.is_read:
            self._tell(donor, receiver, granules, "price", reason, dry_run=True)

    def take_wishes(self) -> Plan:
        """The trades declined since the last call, each as large as the largest of its pair."""
        wishes, self._wishes = self._wishes, {}
        return tuple(
            Move(
                donor=self._names[donor],
                receiver=self._names[receiver],
                granules=granules,
                reason="wanted",
            )
            for (donor, receiver), granules in wishes.items()
        )

    def _tell(
        self,
        donor: int,
        receiver: int | None,
        granules: int,
        cause: Cause,
        reason: str,
        *,
        dry_run: bool = False,
    ) -> None:
        giver = self._names[donor]
        taker = None if receiver is None else self._names[receiver]
        level = logging.INFO if cause in ("plan", "budget") else logging.DEBUG
        verb = "would give" if dry_run else "gave"
        to = taker or "the system"
        _log.log(level, "%s %s %d granules to %s: %s", giver, verb, granules, to, reason)
        if self._events is not None:
            self._events(
                GroundMoved(
                    donor=giver,
                    receiver=taker,
                    granules=granules,
                    cause=cause,
                    reason=reason,
                    dry_run=dry_run,
                )
            )


def price_reason(donor: Offer | None, donor_bytes: int, own: Offer | None, own_bytes: int) -> str:
    """Both sides' prices in numbers; sizes are page bytes, None is a pool without cached pages of
    worth.
    """
    return f"donor {_price(donor, donor_bytes)}; receiver {_price(own, own_bytes)} instead"


def _price(offer: Offer | None, page_bytes: int) -> str:
    if offer is None:
        return "drops nothing of worth"
    num_bytes = offer.pages * page_bytes
    return (
        f"drops {offer.tokens:,} hit tokens in {num_bytes:,} bytes unused for {offer.age:,} matches"
        f" (priority {offer.priority})"
    )
