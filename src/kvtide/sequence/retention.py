"""Where will the next match end? Which boundaries of a prompt get a state, and at what price.

Pure functions. Boundaries and distances are in tokens.
"""

from __future__ import annotations

WORTH = 512
"""A state that saves a match fewer tokens than this drops nothing that has a price."""


def next_boundary(computed: int, end: int, interval: int) -> int:
    """First boundary of the thinning grid after `computed` and at most `end`; 0 if there is none.

    The grid of a prompt that ends at `end`, from there backwards: the last multiple of `interval`,
    the last of 2 `interval` before that one, the last of 4 `interval` before that one, and so on.
    A match that parts d tokens before the end finds a state less than 2 (d + `interval`) before it,
    with no more states than the logarithm of the prompt's length. They stand on multiples, so that
    prompts with a common beginning have them in common.
    """
    step, first, last = interval, 0, end // interval * interval
    while last > computed:
        first, step = last, 2 * step
        last = (last - 1) // step * step
    return first


def is_worth_a_price(saved: int, interval: int) -> bool:
    """May a state whose predecessor stands `saved` tokens before it drop pages that have a price?

    States are large: one takes the bytes of some thousand tokens of keys and values. For a short
    question or answer it is cheaper to compute the tokens again. A fine `interval` says that the
    caller wants less computed again.
    """
    return saved >= min(WORTH, interval // 2)
