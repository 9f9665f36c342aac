"""Lifetimes: which blocks a layer group still needs at `length` computed tokens. Pure rules."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple, TypeAlias, assert_never

from kvtide.errors import ConfigError
from kvtide.types import ceil_div


class Span(NamedTuple):
    """Half-open range `[start, stop)`, here of block indices."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Full:
    """Every token stays readable for as long as the sequence lives."""


@dataclass(frozen=True, slots=True)
class Window:
    """A token reads itself and the `tokens - 1` before it, and the first `sinks` of the sequence.

    With `n` tokens computed, the next one may read indices `>= n - tokens + 1`.
    """

    tokens: int
    sinks: int = 0

    def __post_init__(self) -> None:
        """Refuse an empty window and negative sinks."""
        require_positive("window", self.tokens)
        require_not_negative("sinks", self.sinks)


@dataclass(frozen=True, slots=True)
class State:
    """One constant-size state that stands for all tokens before it; reusable only where a
    snapshot was taken: on a grid of multiples of `interval_tokens`, and where prompts end or part.
    """

    interval_tokens: int

    def __post_init__(self) -> None:
        """Refuse an interval below one token."""
        require_positive("interval_tokens", self.interval_tokens)


@dataclass(frozen=True, slots=True)
class Mirror:
    """A drafter's copy of full attention; it may run `look_ahead` tokens past the target."""

    look_ahead: int

    def __post_init__(self) -> None:
        """Refuse a negative look-ahead."""
        require_not_negative("look_ahead", self.look_ahead)


Lifetime: TypeAlias = Full | Window | State | Mirror


def require_positive(field: str, value: int) -> None:
    """Raise ConfigError naming `field` unless `value` is a whole number >= 1."""
    _require_whole(field, value)
    if value < 1:
        raise ConfigError(f"{field} must be >= 1, got {value}; give a positive {field}")


def require_not_negative(field: str, value: int) -> None:
    """Raise ConfigError naming `field` unless `value` is a whole number >= 0."""
    _require_whole(field, value)
    if value < 0:
        raise ConfigError(f"{field} must be >= 0, got {value}; use 0 for none")


def _require_whole(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{field} is {value!r}; give a whole number")


def needed_blocks(lifetime: Lifetime, length: int, block_tokens: int) -> tuple[Span, ...]:
    """Block ranges needed to compute token `length` when `[0, length)` are computed.

    The spans are ascending, disjoint, not adjacent and never empty. They say what is read, not
    what is written: a window of one token reads no past, yet its open page is its writer's. A
    state needs no block: it needs a snapshot exactly at `length` instead.
    """
    match lifetime:
        case Full() | Mirror():
            return _merged(Span(0, ceil_div(length, block_tokens)))
        case Window(tokens, sinks):
            first = max(0, length - tokens + 1)
            return _merged(
                Span(0, ceil_div(min(sinks, length), block_tokens)),
                _covering(first, length, block_tokens),
            )
        case State():
            return ()
        case _:
            assert_never(lifetime)


def _covering(start: int, stop: int, block_tokens: int) -> Span:
    """Blocks that cover tokens `[start, stop)`; empty if the range is."""
    if start >= stop:
        return Span(0, 0)
    return Span(start // block_tokens, ceil_div(stop, block_tokens))


def _merged(*spans: Span) -> tuple[Span, ...]:
    """Ascending `spans` without the empty ones, neighbours and overlaps joined."""
    joined: list[Span] = []
    for span in spans:
        if span.start >= span.stop:
            continue
        if joined and span.start <= joined[-1].stop:
            joined[-1] = Span(joined[-1].start, max(joined[-1].stop, span.stop))
        else:
            joined.append(span)
    return tuple(joined)
