"""Prompts out of content ids: equal where the ids are, different elsewhere, all below int32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim.traces.samples import request

from kvtide import ConfigError
from kvtide.sim.traces import answer_token
from kvtide.sim.traces.request import NUM_ANSWERS, PROMPT_TOKENS


def test_tokens_are_id_times_block_plus_offset() -> None:
    prompt = request(0.0, [3, 7], tokens=6).prompt()
    assert prompt.tolist() == [12, 13, 14, 15, 28, 29]
    assert prompt.dtype == np.int32


def test_a_run_is_the_same_as_its_ids() -> None:
    one_by_one = request(0.0, [5, 6, 7, 2, 3], tokens=18)
    runs = np.array([[5, 3], [2, 2]], np.int64)
    assert replace(one_by_one, runs=runs).prompt().tolist() == one_by_one.prompt().tolist()


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.integers(1, 7),
)
def test_two_prompts_agree_exactly_where_their_ids_do(
    left: list[int], right: list[int], block: int
) -> None:
    prompts = [request(0.0, ids, block=block).prompt() for ids in (left, right)]
    blocks = min(len(left), len(right))
    equal = prompts[0][: blocks * block] == prompts[1][: blocks * block]
    same = np.array([a == b for a, b in zip(left, right, strict=False)])
    assert equal.tolist() == np.repeat(same, block).tolist()


def test_the_largest_token_is_below_those_of_answers() -> None:
    last = PROMPT_TOKENS // 4 - 1
    assert request(0.0, [last]).prompt().tolist()[-1] == PROMPT_TOKENS - 1
    with pytest.raises(ConfigError, match=r"at 0\.0: content ids need token ids up to 2130706435"):
        request(0.0, [last + 1]).prompt()
    with pytest.raises(ConfigError, match="token ids up to 2130706432"):
        request(0.0, [PROMPT_TOKENS], block=1).prompt()


def test_ids_must_cover_the_prompt() -> None:
    with pytest.raises(ConfigError, match="9 input tokens, but its content ids cover 8"):
        request(0.0, [1, 2], tokens=9).prompt()


def test_answers_are_tokens_of_nobody_else() -> None:
    assert answer_token(0) == PROMPT_TOKENS
    assert answer_token(NUM_ANSWERS - 1) == 2**31 - 1
    for number in (-1, NUM_ANSWERS):
        with pytest.raises(ConfigError, match="request number"):
            answer_token(number)
