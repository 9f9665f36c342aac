"""One request of a trace, and what a trace is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvtide.errors import ConfigError
from kvtide.sim.traces.statistics import statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtide.sim.traces.statistics import Statistics
    from kvtide.types import IntArray, TokenArray

NUM_ANSWERS = 2**24
"""Token ids at the top of int32 that no prompt may use: one for each answer of a run."""

PROMPT_TOKENS = 2**31 - NUM_ANSWERS
"""Every token of every prompt is below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """When a request came, how long it and its answer are, and what its prompt is made of.

    `arrival`: seconds since the trace began. `runs`: int64 [k, 2], rows of (first content id,
    count); id `i` stands for `block` tokens, and equal ids for equal tokens. The ids cover
    `input_tokens`, the last of them perhaps in part. `tenant`: index into the trace's `tenants`.
    """

    arrival: float
    input_tokens: int
    output_tokens: int
    runs: IntArray
    block: int
    tenant: int = 0

    def prompt(self) -> TokenArray:
        """The prompt, int32 [input_tokens]: content id * block + offset within the block.

        So two prompts agree in a token exactly where they agree in a content id and an offset.
        Raises ConfigError if an id is too large for that, or the ids do not cover the prompt.
        """
        first, count = self.runs[:, 0], self.runs[:, 1]
        if len(first):
            check_tokens(int((first + count).max()) * self.block, f"the request at {self.arrival}")
        sizes = count * self.block
        ends = np.cumsum(sizes)
        total = int(ends[-1]) if len(ends) else 0
        if total < self.input_tokens:
            raise ConfigError(
                f"the request at {self.arrival} s has {self.input_tokens} input tokens, but its "
                f"content ids cover {total}; add ids for the rest"
            )
        jumps = (first * self.block - (ends - sizes)).astype(np.int32)
        tokens = np.arange(self.input_tokens, dtype=np.int32)
        if len(jumps) == 1:
            return tokens + jumps[0]
        return tokens + np.repeat(jumps, sizes)[: self.input_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where anyone can get a trace: a public address, what it is, and its licence."""

    url: str
    licence: str
    about: str = ""


NO_SOURCE = Source(url="", licence="", about="given by the user")


class Trace(Protocol):
    """Requests in the order of their arrival, read as one iterates; iterating again starts over."""

    @property
    def name(self) -> str:
        """Short name for tables and file names."""
        ...

    @property
    def source(self) -> Source:
        """Where the trace can be had, and its licence."""
        ...

    @property
    def tenants(self) -> tuple[str, ...]:
        """Names of those whose requests these are; requests of different tenants share nothing."""
        ...

    def __iter__(self) -> Iterator[TraceRequest]: ...

    def describe(self) -> Statistics:
        """Read the whole trace once and count."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A trace made of a function that begins an iteration."""

    name: str
    start: Callable[[], Iterator[TraceRequest]]
    source: Source = NO_SOURCE
    tenants: tuple[str, ...] = ("all",)

    def __iter__(self) -> Iterator[TraceRequest]:
        return self.start()

    def describe(self) -> Statistics:
        """Read the whole trace once and count."""
        return statistics(self)


def answer_token(number: int) -> int:
    """The token that the answer of request `number` repeats: in no prompt and no other answer."""
    if not 0 <= number < NUM_ANSWERS:
        raise ConfigError(
            f"request number {number} is outside [0, {NUM_ANSWERS}): there are no more tokens for "
            "answers; replay a shorter trace (first=...)"
        )
    return PROMPT_TOKENS + number


def check_tokens(end: int, where: str) -> None:
    """Raise ConfigError, naming `where`, if its prompt needs a token id as large as `end` - 1."""
    if end > PROMPT_TOKENS:
        raise ConfigError(
            f"{where}: content ids need token ids up to {end - 1}, but a prompt has only those "
            f"below {PROMPT_TOKENS} (int32, less the answers); number the contents densely from 0, "
            "or replay fewer requests or traces at once"
        )
