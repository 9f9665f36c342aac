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


def may_drop_priced(saved: int, interval: int, *, is_grid: bool) -> bool:
    """May a state drop cached pages that have a price? `saved` tokens lie between it and the last
    state on its path; `is_grid`: nothing but the grid wants it there.

    A state takes the bytes of some thousand tokens of keys and values: to compute a short question
    or answer again costs less. A fine `interval` says that the caller wants less computed again.
    """
    return not is_grid and saved >= min(WORTH, interval // 2)
