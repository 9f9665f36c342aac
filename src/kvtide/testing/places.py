"""Where tokens and states stand in the pages of a layer group, and the stamps they must bear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtide.errors import KvError
from kvtide.pool import NO_OWNER, Pool
from kvtide.testing.stamps import HashArray, label, stamps
from kvtide.types import SINK, IntArray

if TYPE_CHECKING:
    from kvtide.layout import LayerGroup

Bytes = npt.NDArray[np.uint8]


class WrongBytesError(KvError, AssertionError):
    """A page does not hold what its reader was promised, or was written by someone who may not."""


@dataclass(frozen=True, slots=True)
class Places:
    """Tokens (or states) in pages of one layer group, one entry each.

    Entry i stands at slot `slots[i]` (token within the block; 0 for a state) of page `pages[i]`;
    it is position `positions[i]` of sequence `users[i]`, and its prefix hashes to `hashes[i]`.
    """

    pages: IntArray
    slots: IntArray
    users: IntArray
    positions: IntArray
    hashes: HashArray

    @classmethod
    def join(cls, parts: list[Places]) -> Places:
        """All entries of `parts`, in order."""
        empty = np.empty(0, np.int64)
        none = cls(empty, empty, empty, empty, empty.astype(np.uint64))
        columns = ("pages", "slots", "users", "positions", "hashes")
        return cls(*(np.concatenate([getattr(p, c) for p in [none, *parts]]) for c in columns))

    def only(self, chosen: npt.NDArray[np.bool_] | IntArray) -> Places:
        """The entries where `chosen` is True, or those it numbers."""
        return Places(
            self.pages[chosen],
            self.slots[chosen],
            self.users[chosen],
            self.positions[chosen],
            self.hashes[chosen],
        )

    @property
    def keys(self) -> IntArray:
        """One number per place, the same for the same place."""
        return self.pages << 32 | self.slots

    def __len__(self) -> int:
        """Number of entries."""
        return len(self.pages)


class GroupBytes:
    """Views of one layer group's buffers in its pool's arena, as bytes [page, slot, byte]."""

    def __init__(self, group: LayerGroup, pool: Pool) -> None:
        self.group = group
        self.pool = pool
        whole = np.frombuffer(pool.arena.buffer(), np.uint8)
        slots = group.entries
        self._buffers: dict[tuple[int, str], Bytes] = {}
        for place, layer in enumerate(group.layers):
            for buffer in group.buffers:
                self._buffers[layer, buffer.name] = np.lib.stride_tricks.as_strided(
                    whole[group.offset(place, buffer.name) :],
                    (pool.space.num_pages, slots, buffer.bytes),
                    (pool.page_bytes, buffer.bytes, 1),
                )

    def write(self, at: Places) -> None:
        """Stamp every buffer at these places, which must be their writers' alone."""
        self._require_pages(at)
        books = self.pool.books
        seen = (books.lease[at.pages] != 1) | (books.owner[at.pages] != NO_OWNER)
        if seen.any():
            raise WrongBytesError(f"{self._who(at, seen)} writes to a page that others can see")
        for (layer, name), view in self._buffers.items():
            view[at.pages, at.slots] = stamps(at.hashes, self._role(layer, name), view.shape[2])

    def verify(self, at: Places, doing: str) -> None:
        """Read every buffer at these places; WrongBytesError at the first wrong stamp."""
        self._require_pages(at)
        for (layer, name), view in self._buffers.items():
            expected = stamps(at.hashes, self._role(layer, name), view.shape[2])
            wrong = (view[at.pages, at.slots] != expected).any(axis=1)
            if wrong.any():
                raise WrongBytesError(
                    f"{doing}: {self._who(at, wrong)}: foreign bytes in {name!r} of layer "
                    f"{layer} ({int(wrong.sum())} of {len(at)} places are wrong)"
                )

    def _role(self, layer: int, buffer: str) -> int:
        return label(self.group.name, layer, buffer)

    def _require_pages(self, at: Places) -> None:
        lost = (at.pages <= SINK) | ~self.pool.books.exists[at.pages]
        if lost.any():
            raise WrongBytesError(f"{self._who(at, lost)} has no page there")

    def _who(self, at: Places, which: npt.NDArray[np.bool_]) -> str:
        i = int(which.argmax())
        return (
            f"sequence {at.users[i]} at position {at.positions[i]}, "
            f"page {at.pages[i]} of pool {self.pool.name!r}"
        )
