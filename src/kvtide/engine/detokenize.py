"""Token ids -> text, piece by piece, without ever taking a piece back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens left out."""

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 6


def find_stop(text: str, stops: Sequence[str], start: int) -> tuple[int, str] | None:
    """Place and string of the earliest stop in `text[start:]`; of two at one place the longer."""
    found = [(at, -len(stop), stop) for stop in stops if (at := text.find(stop, start)) >= 0]
    if not found:
        return None
    at, _, stop = min(found)
    return at, stop


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that a stop string may still grow from."""
    longest = min(len(text), max((len(stop) - 1 for stop in stops), default=0))
    ends = (n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stops))
    return next(ends, 0)


class Detokenizer:
    """Text of one answer as it grows.

    `context` are the last tokens of the prompt: some vocabularies write a word differently at the
    start of a text. Text is given out once it can not change any more: not while a character is
    incomplete, and not while it may become a stop string.
    """

    def __init__(self, decode: Decode, *, context: Sequence[int], stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._tokens = list(context[-_CONTEXT_TOKENS:])
        self._stable = 0  # tokens before this are context only: their text is settled
        self._read = len(self._tokens)  # tokens before this are in `_text`
        self._text = ""
        self._sent = 0
        self.stopped_by: str | None = None

    @property
    def text(self) -> str:
        """All text given out so far."""
        return self._text[: self._sent]

    def push(self, token: int) -> str:
        """Take one more token and return the text that is settled now, maybe none."""
        self._tokens.append(token)
        return self._send(self._grow())

    def flush(self) -> str:
        """End of the answer: return what was held back."""
        if self.stopped_by is None:
            self._absorb(self._unread())
        return self._send(len(self._text))

    def _grow(self) -> int:
        """Take in what is new; return how much of the text is settled."""
        new = self._unread()
        if new and not new.endswith(_BROKEN):
            self._absorb(new)
        if self.stopped_by is not None:
            return len(self._text)
        return len(self._text) - held_back(self._text, self._stops)

    def _absorb(self, new: str) -> None:
        """Add text, and cut it where a stop string begins."""
        start = len(self._text) - max(map(len, self._stops), default=0)
        self._text += new
        self._stable, self._read = self._read, len(self._tokens)
        found = find_stop(self._text, self._stops, max(start, self._sent))
        if found is not None:
            at, self.stopped_by = found
            self._text = self._text[:at]

    def _unread(self) -> str:
        """Text of the tokens that are not in `_text` yet.

        Decoding from a few tokens back and cutting the known part off keeps spaces right in
        vocabularies that drop the first one.
        """
        known = self._decode(self._tokens[self._stable : self._read])
        return self._decode(self._tokens[self._stable :])[len(known) :]

    def _send(self, settled: int) -> str:
        """Give out the text up to `settled` that was not given out before."""
        start, self._sent = self._sent, max(self._sent, settled)
        return self._text[start : self._sent]
