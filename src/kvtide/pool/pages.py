"""Who may use which page of one pool. Structure of arrays indexed by page id; no bytes, no loops.

A page that exists is in exactly one of these states:

    free       nobody names it; its bytes are worthless
    in flight  nobody names it any more, but a step that may still read it has not passed its fence
    leased     sequences use it (`lease` counts them), whether or not the prefix tree names it too
    cached     only the prefix tree names it (`owner`): valid bytes, may be dropped

Free pages are handed out from the end of a stack. The stack is sorted again (lowest ids last) after
as many releases as it holds entries, so placement stays dense at constant cost a page.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtide.errors import InvariantError, UsageError
from kvtide.types import SINK, PageArray

if TYPE_CHECKING:
    from kvtide.pool.fences import Fences

NO_OWNER = 0

_MANY = 256
"""Notes on newly cached pages are merged beyond this many, so that they stay few."""


class PageBooks:
    """The books of up to `max_pages` pages, of which some exist. Page 0 is the sink: never handed
    out.
    """

    __slots__ = (
        "_fences",
        "_free",
        "_in_flight",
        "_unsorted",
        "exists",
        "idle_since",
        "lease",
        "max_pages",
        "newly_cached",
        "num_cached",
        "num_free",
        "num_in_flight",
        "num_leased",
        "num_pages",
        "owner",
    )  # fmt: skip

    def __init__(self, max_pages: int, fences: Fences) -> None:
        self.max_pages = max_pages
        self._fences = fences
        self.exists = np.zeros(max_pages, np.bool_)
        # The others are as long as the highest page that ever existed: a pool's addresses span the
        # whole budget, its pages seldom do.
        self.lease = self.owner = self._free = np.zeros(0, np.int32)
        self.idle_since = np.zeros(0, np.int64)
        self._in_flight: deque[tuple[int, PageArray]] = deque()
        self._unsorted = 0
        self.newly_cached: list[PageArray] | None = None
        """Owners of pages that lost their last lease, for an eviction order that wants to know."""
        self.num_free = self.num_in_flight = self.num_leased = self.num_cached = 0
        self.num_pages = 0

    # -- existence -----------------------------------------------------------------------------

    def create(self, pages: PageArray) -> None:
        """`pages` exist from now on and are free (the sink is set aside)."""
        if len(pages):
            self._reach(int(pages.max()) + 1)
        self.exists[pages] = True
        self.num_pages += len(pages)
        self._push(pages[pages != SINK])
        self._sort()

    def _reach(self, num_pages: int) -> None:
        """Lengthen the arrays so that page `num_pages - 1` has a place."""
        if num_pages > len(self.lease):
            size = min(self.max_pages, max(num_pages, len(self.lease) * 5 // 4))
            for name in ("lease", "owner", "idle_since", "_free"):
                old = getattr(self, name)
                new = np.zeros(size, old.dtype)
                new[: len(old)] = old
                setattr(self, name, new)

    def destroy(self, pages: PageArray) -> None:
        """`pages` cease to exist. All must be free; raises UsageError otherwise, changing
        nothing.
        """
        doomed = np.zeros(self.max_pages, np.bool_)
        doomed[pages] = True
        stack = self._free[: self.num_free]
        keep = stack[~doomed[stack]]
        if self.num_free - len(keep) != len(pages):
            busy = len(pages) - (self.num_free - len(keep))
            raise UsageError(
                f"{busy} of {len(pages)} pages to destroy are not free; vacate them first"
            )
        self.exists[pages] = False
        self._free[: len(keep)] = keep
        self.num_free = len(keep)
        self.num_pages -= len(pages)

    # -- taking and giving ---------------------------------------------------------------------

    def take(self, n: int) -> PageArray | None:
        """Lease `n` free pages to a new user, or return None and change nothing."""
        if n > self.num_free and (not self._in_flight or n > self._drain()):
            return None
        left = self.num_free - n
        pages = self._free[left : self.num_free][::-1].copy()
        self.num_free = left
        self.lease[pages] = 1
        self.num_leased += n
        return pages

    def share(self, pages: PageArray) -> None:
        """Add one lease to each of `pages` (all different, all leased or cached)."""
        before = self.lease[pages]
        self.lease[pages] = before + 1
        woken = len(pages) - int(np.count_nonzero(before))
        self.num_leased += woken
        self.num_cached -= woken

    def release(self, pages: PageArray) -> None:
        """End one lease of each of `pages` (all different); unnamed ones become free behind the
        fence.
        """
        left = self.lease[pages] - 1
        self.lease[pages] = left
        idle = pages[left == 0]
        if len(idle):
            self._settle(idle)

    def release_each(self, pages: PageArray) -> None:
        """As `release`, where the same page may be listed several times, once per lease."""
        np.subtract.at(self.lease, pages, 1)
        idle = pages[self.lease[pages] == 0]
        if len(idle):
            self._settle(np.unique(idle) if len(idle) > 1 else idle)

    def adopt(self, pages: PageArray, owner: int) -> None:
        """The prefix tree's node `owner` (> 0) names `pages` (all leased) from now on."""
        self.owner[pages] = owner

    def disown(self, pages: PageArray) -> int:
        """The prefix tree stops naming `pages`; return how many of them that left without a
        user.
        """
        self.owner[pages] = NO_OWNER
        idle = pages[self.lease[pages] == 0]
        self.num_cached -= len(idle)
        self._free_behind_fence(idle)
        return len(idle)

    def _settle(self, idle: PageArray) -> None:
        """`idle` just lost their last lease: cached if the tree names them, free otherwise."""
        self.num_leased -= len(idle)
        fences = self._fences
        if fences.issued != fences.completed:
            self.idle_since[idle] = fences.issued
        named = self.owner[idle] != NO_OWNER
        num_named = int(np.count_nonzero(named))
        self.num_cached += num_named
        if num_named and self.newly_cached is not None:
            self.newly_cached.append(self.owner[idle[named]])
            if len(self.newly_cached) > _MANY:
                self.newly_cached[:] = [np.unique(np.concatenate(self.newly_cached))]
        if num_named < len(idle):
            self._free_behind_fence(idle[~named] if num_named else idle)

    def _free_behind_fence(self, pages: PageArray) -> None:
        """Free `pages`, each once the last step that may have read it has passed its fence."""
        if self._fences.issued == self._fences.completed:
            self._push(pages)
            return
        since = self.idle_since[pages]
        late = since > self._fences.completed
        self._push(pages[~late])
        for step in np.unique(since[late]):
            waiting = pages[since == step]
            self._in_flight.append((int(step), waiting))
            self.num_in_flight += len(waiting)

    def _drain(self) -> int:
        """Free the pages whose fence has passed; return the number of free pages."""
        completed = self._fences.poll()
        still: deque[tuple[int, PageArray]] = deque()
        for step, pages in self._in_flight:
            if step <= completed:
                self.num_in_flight -= len(pages)
                self._push(pages)
            else:
                still.append((step, pages))
        self._in_flight = still
        return self.num_free

    def drain(self) -> None:
        """Free every page whose fence has passed."""
        if self._in_flight:
            self._drain()

    def _push(self, pages: npt.NDArray[np.int32]) -> None:
        n = len(pages)
        self._free[self.num_free : self.num_free + n] = pages
        self.num_free += n
        self._unsorted += n
        if self._unsorted > self.num_free and n > 1:
            self._sort()

    def _sort(self) -> None:
        stack = self._free[: self.num_free]
        stack.sort()
        self._free[: self.num_free] = stack[::-1].copy()
        self._unsorted = 0

    # -- facts ---------------------------------------------------------------------------------

    def free_mask(self) -> npt.NDArray[np.bool_]:
        """Boolean array over all page ids: True where the page is free."""
        mask = np.zeros(self.max_pages, np.bool_)
        mask[self._free[: self.num_free]] = True
        return mask

    def in_flight_pages(self) -> PageArray:
        """Pages that wait for a fence."""
        waiting = [pages for _, pages in self._in_flight]
        return np.concatenate(waiting) if waiting else np.empty(0, np.int32)

    def busy_pages(self) -> PageArray:
        """Pages that a step in flight may read or write: leased ones, and cached ones that were
        leased when it began.
        """
        lately = (self.owner != NO_OWNER) & (self.idle_since > self._fences.completed)
        return np.flatnonzero((self.lease > 0) | lately).astype(np.int32)

    def take_outside(self, forbidden: npt.NDArray[np.bool_], n: int) -> PageArray | None:
        """As `take`, lowest ids first, avoiding pages where `forbidden` is True."""
        stack = self._free[: self.num_free]
        allowed = np.sort(stack[~forbidden[stack]])[:n]
        if len(allowed) < n:
            return None
        chosen = np.zeros(self.max_pages, np.bool_)
        chosen[allowed] = True
        keep = stack[~chosen[stack]]
        self._free[: len(keep)] = keep
        self.num_free = len(keep)
        self.lease[allowed] = 1
        self.num_leased += n
        return allowed

    def move(self, src: PageArray, dst: PageArray) -> None:
        """`dst` (leased by `take_outside`) take over leases and owners of `src`, which become
        free.
        """
        self.lease[dst] = self.lease[src]
        self.owner[dst] = self.owner[src]
        self.lease[src] = 0
        self.owner[src] = NO_OWNER
        # Leased and cached pages only changed places; take_outside's own leases on dst end here.
        self.num_leased -= len(src)
        self._push(src)

    def check(self) -> None:
        """Raise InvariantError unless every page is in exactly one state and all counts are
        right.
        """
        free = self._free[: self.num_free]
        in_flight = self.in_flight_pages()
        idle = np.concatenate([free, in_flight])
        exists = np.flatnonzero(self.exists)
        gone = ~self.exists[: len(self.lease)]
        leased = int(np.count_nonzero(self.lease[exists] > 0))
        cached = int(np.count_nonzero((self.lease[exists] == 0) & (self.owner[exists] != NO_OWNER)))
        facts = {
            "a free page is listed twice": len(np.unique(idle)) == len(idle),
            "the sink is free": SINK not in idle,
            "a free page does not exist": bool(self.exists[idle].all()),
            "a free page is leased": not self.lease[idle].any(),
            "a free page has an owner": not self.owner[idle].any(),
            "a lease count is negative": bool((self.lease >= 0).all()),
            "a page that does not exist is in use": not (self.lease + self.owner)[gone].any(),
            f"num_leased {self.num_leased} != {leased}": self.num_leased == leased,
            f"num_cached {self.num_cached} != {cached}": self.num_cached == cached,
            f"num_in_flight {self.num_in_flight} != {len(in_flight)}": (
                self.num_in_flight == len(in_flight)
            ),
            f"num_pages {self.num_pages} != {len(exists)}": self.num_pages == len(exists),
            "free + in flight + leased + cached + sink != pages": (
                len(idle) + leased + cached + int(self.exists[SINK]) == len(exists)
            ),
        }  # fmt: skip
        for fault, holds in facts.items():
            if not holds:
                raise InvariantError(fault)
