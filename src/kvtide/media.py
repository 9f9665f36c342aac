"""Media content as part of the token key: placeholders of different images must never match.

A prompt holds the same placeholder id for every image. Each distinct (digest, length) is given a
range of negative ids, one per position, so equality of tokens is equality of content, at any block
size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtide.errors import CapacityError, ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtide.types import TokenArray

MIN_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Media:
    """`length` placeholder tokens from `start` on stand for content with this digest.

    The digest must cover everything the encoder sees: bytes, shape, type. At least 128 bits.
    """

    start: int
    length: int
    digest: bytes

    def __post_init__(self) -> None:
        """Refuse empty spans and short digests."""
        if self.start < 0 or self.length < 1:
            raise ConfigError(
                f"media span starts at {self.start} with {self.length} tokens; give 0.. and 1.."
            )
        if len(self.digest) < MIN_DIGEST_BYTES:
            raise ConfigError(
                f"media digest has {8 * len(self.digest)} bits; give at least "
                f"{8 * MIN_DIGEST_BYTES} (SHA-256 has 256)"
            )


class MediaIds:
    """Negative token ids by media content. Grows with distinct content until `clear`."""

    __slots__ = ("_first", "_next")

    def __init__(self) -> None:
        self._first: dict[tuple[bytes, int], int] = {}
        self._next = -1

    def mark(self, tokens: TokenArray, media: Sequence[Media]) -> TokenArray:
        """A copy of `tokens` with each media span replaced by its content's ids."""
        marked = tokens.copy()
        end = 0
        for item in sorted(media, key=lambda item: item.start):
            if item.start < end:
                raise UsageError(
                    f"media span [{item.start}, {item.start + item.length}) overlaps another, "
                    f"which ends at {end}; give each token to one item"
                )
            end = item.start + item.length
            if item.start + item.length > len(tokens):
                raise UsageError(
                    f"media span [{item.start}, {item.start + item.length}) is outside the "
                    f"{len(tokens)} tokens"
                )
            first = self._intern(item)
            marked[item.start : item.start + item.length] = np.arange(
                first, first - item.length, -1
            )
        return marked

    def _intern(self, item: Media) -> int:
        key = (item.digest, item.length)
        first = self._first.get(key)
        if first is None:
            if self._next - item.length < np.iinfo(np.int32).min:
                raise CapacityError(
                    "2**31 distinct media tokens were seen; call reset() to start over"
                )
            first = self._first[key] = self._next
            self._next -= item.length
        return first

    def clear(self) -> None:
        """Forget all content; only legal when no cached prefix names it any more.

        Ids are not reused, so sequences that live on stay distinct from later ones.
        """
        self._first.clear()
