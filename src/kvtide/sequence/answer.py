"""What a verb answers, and what reuse amounts to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtide.sequence.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Answer:
    """May it go ahead? If not, nothing has changed and `pool` said no: `needed` pages,
    `available`.
    """

    ok: bool
    pool: str = ""
    needed: int = 0
    available: int = 0

    def __bool__(self) -> bool:
        """True if the verb was carried out."""
        return self.ok


GRANTED = Answer(ok=True)


@dataclass(slots=True)
class Reuse:
    """Tokens that did and did not have to be computed, counted once a request has really run."""

    num_sequences: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    recomputed_tokens: int = 0

    def prove(self, seq: Sequence) -> None:
        """`seq` has run its first step since admission."""
        if seq.peak:
            self.recomputed_tokens += max(0, seq.peak - seq.hit)
            return
        self.num_sequences += 1
        self.prompt_tokens += seq.prompt_tokens
        self.hit_tokens += seq.hit
