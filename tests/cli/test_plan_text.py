"""Words of the report that small layouts call for."""

from __future__ import annotations

from typing import Any

from tests.tiny import draft, full, state, window

from kvtide import Layout
from kvtide.cli.plan.text import report
from kvtide.planner import Options, Request, Workload, plan_layouts

GRANULE = 1024


def text_of(
    *specs: Any, granules: int = 40, max_tokens: int = 64, block_tokens: int = 4, **fields: Any
) -> str:
    layout = Layout.from_layers(dict(enumerate(specs)), block_tokens=block_tokens)
    asked = Options(memory=granules * GRANULE, granule_bytes=GRANULE, **fields)
    return "\n".join(str(line) for line in report(plan_layouts("m", [layout], max_tokens, asked)))


def of(prompt: int, answer: int = 0, **fields: Any) -> Workload:
    return Workload(requests=(Request(input_tokens=prompt, output_tokens=answer),), **fields)


def test_lifetimes_are_named() -> None:
    text = text_of(full(), window(8), window(12, sinks=3), draft(3), state())
    for words in ("window 8 ", "window 12 + 3", "mirror + 3", "state "):
        assert words in text


def test_padding_is_explained_where_there_is_some() -> None:
    assert "bytes of a page that align its tensors" in text_of(full(5), block_tokens=1)
    assert "align its tensors" not in text_of(full())


def test_a_workload_of_which_not_one_fits() -> None:
    text = text_of(full(), granules=8, max_tokens=400, workload=of(300))
    assert "DOES NOT FIT: memory lacks" in text
    assert "not one fits: the shares are those of what they need" in text


def test_a_split_that_strands_nothing() -> None:
    text = text_of(full(), pool_ratio=(1.0,), workload=of(32, 4))
    assert "Nothing is stranded." in text


def test_what_runs_out_may_keep_nothing_of_a_prefix() -> None:
    # A window of one token is its own and reads nothing before it.
    text = text_of(full(), window(1), pool_ratio=(0.9, 0.1), workload=of(4))
    assert "The pools that run out (window_1) keep nothing of a cached prefix." in text


def test_a_state_that_runs_out_counts_a_prefix_as_its_snapshot() -> None:
    text = text_of(full(), state(), pool_ratio=(0.9, 0.1), workload=of(4))
    assert "In what runs out (state), where a token of a prefix takes 0.13 bytes on average" in text
    assert "prefixes of 2,000 tokens (256 bytes each)" in text


def test_needs_without_room_for_floors_are_met_all_the_same() -> None:
    text = text_of(full(), window(8), granules=8, max_tokens=400, needs={"full": 4 * GRANULE})
    assert "A split that strands nothing: --pool-ratio full=0.5000000,window_8=0.5000000" in text
    assert "DOES NOT FIT" in text
