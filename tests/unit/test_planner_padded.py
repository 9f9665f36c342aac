"""One page size for all layers: both rules by hand, and never fewer bytes than separate pools."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny import draft, full, state, window

from kvtide import Layout
from kvtide.layout import FullSpec, LayerGroup, Spec, StateSpec, WindowSpec
from kvtide.layout.buffer import Buffer
from kvtide.planner import running_pages
from kvtide.planner.padded import (
    LengthFit,
    common_multiple,
    equal_blocks,
    equal_pages,
    large_pages,
    padded,
)


def groups_of(*kinds: tuple[int, Spec], block_tokens: int = 16) -> tuple[LayerGroup, ...]:
    """`(number of layers, spec)` a kind, one kind after the other."""
    specs = [spec for number, spec in kinds for _ in range(number)]
    return Layout.from_layers(dict(enumerate(specs)), block_tokens=block_tokens).groups


ATTENTION = FullSpec(kv_heads=2, head_dim=256, dtype="bfloat16")  # 2,048 bytes a token and layer
SLIDING = WindowSpec(window=128, kv_heads=2, head_dim=256, dtype="bfloat16")


def test_layers_that_keep_every_token_share_a_table() -> None:
    groups = groups_of((4, full()), (2, full(4)), (1, draft()))
    assert equal_pages(groups) is None
    found = padded(groups, 100, LengthFit(bytes=77, sequences=5, memory_bytes=1000))
    assert (found.equal_pages_bytes, found.equal_pages_sequences) == (77, 5)


def test_groups_are_as_large_as_the_smallest_kind() -> None:
    # 5 full and 25 sliding layers: 1 + 5 groups of 5.
    rule = equal_pages(groups_of((5, ATTENTION), (25, SLIDING)))
    assert rule is not None
    assert rule.layers_per_group == 5
    assert [kind.num_groups for kind in rule.kinds] == [1, 5]
    assert [kind.padding_layers for kind in rule.kinds] == [0, 0]
    assert rule.page_bytes == 5 * 16 * 2048


def test_the_last_group_is_padded() -> None:
    # 5 full and 12 sliding: 3 groups of 5 hold 12, with 3 layers of nothing.
    rule = equal_pages(groups_of((5, ATTENTION), (12, SLIDING)))
    assert rule is not None
    assert [(kind.num_groups, kind.padding_layers) for kind in rule.kinds] == [(1, 0), (3, 3)]


def test_groups_are_as_large_as_the_largest_kind_if_that_is_little_more() -> None:
    # 13 full and 12 sliding layers (gpt-oss-20b with a drafter): 13 and 13, not 12, 12 and 24.
    rule = equal_pages(groups_of((13, ATTENTION), (12, SLIDING)))
    assert rule is not None
    assert rule.layers_per_group == 13
    assert [(kind.num_groups, kind.padding_layers) for kind in rule.kinds] == [(1, 0), (1, 1)]


def test_small_pages_get_longer_blocks() -> None:
    small = WindowSpec(window=128, kv_heads=1, head_dim=128, dtype="bfloat16")  # 512 bytes a token
    rule = equal_pages(groups_of((2, ATTENTION), (2, small)))
    assert rule is not None
    assert [(kind.block_tokens, kind.padding_bytes) for kind in rule.kinds] == [(16, 0), (64, 0)]


def test_pages_that_do_not_divide_are_padded() -> None:
    odd = WindowSpec(window=128, kv_heads=3, head_dim=128, dtype="bfloat16")  # 1,536 bytes a token
    rule = equal_pages(groups_of((2, ATTENTION), (2, odd)))
    assert rule is not None
    assert [(kind.block_tokens, kind.padding_bytes) for kind in rule.kinds] == [
        (16, 0),
        (16, 16 * 512),
    ]


def test_blocks_grow_until_a_state_fits_a_page_and_the_state_is_padded() -> None:
    # What vLLM logged for a model of 30 gated delta-net layers and 10 of attention in fp8: "Setting
    # attention block size to 2096 tokens". A state of a layer is 32 x 128 x 128 float32 and 3 x
    # 8,192 bfloat16, a token of a layer 2 x 2 x 256 bytes.
    ssm = Buffer("recurrent", (32, 128, 128), "float32")
    conv = Buffer("conv", (3, 8192), "bfloat16")
    fp8 = FullSpec(kv_heads=2, head_dim=256, dtype="float8_e4m3fn")
    groups = groups_of((30, StateSpec(buffers=(ssm, conv), interval_tokens=256)), (10, fp8))
    rule = equal_pages(groups)
    assert rule is not None
    states, attention = rule.kinds
    assert ssm.bytes + conv.bytes == 2_146_304
    assert attention.block_tokens == 16 * -(-2_146_304 // (16 * 1024)) == 2096
    assert rule.layer_bytes == 2096 * 1024
    assert states.padding_bytes == 2096 * 1024 - 2_146_304 == 0
    assert (states.num_groups, attention.num_groups, rule.layers_per_group) == (3, 1, 10)


def test_blocks_of_one_sequence_by_hand() -> None:
    groups = groups_of((5, ATTENTION), (12, SLIDING))
    rule = equal_pages(groups)
    assert rule is not None
    # 1,000 tokens: 63 blocks, once. The last token reads 872 to 999, blocks 54 to 62, 3 times.
    assert equal_blocks(groups, rule, 1000) == 63 + 3 * 9
    found = padded(groups, 1000, LengthFit(bytes=1, sequences=1, memory_bytes=10**9))
    assert found.equal_pages_bytes == 90 * 163_840
    assert found.equal_pages_sequences == (10**9 // 163_840 - 1) // 90
    # A page is kept for padding: 180 pages hold one sequence of 90, and 181 two.
    for pages, fit in ((180, 1), (181, 2)):
        memory = LengthFit(bytes=1, sequences=1, memory_bytes=pages * 163_840)
        assert padded(groups, 1000, memory).equal_pages_sequences == fit


def test_large_pages_by_hand() -> None:
    groups = groups_of((3, ATTENTION), (2, SLIDING))  # 98,304 and 65,536 bytes a page
    assert common_multiple(groups) == 196_608
    # 63 pages of 98,304 are 31.5 large ones, 9 of 65,536 are 3.
    assert large_pages(groups, 196_608, 1000) == 32 + 3
    found = padded(groups, 1000, LengthFit(bytes=1, sequences=1, memory_bytes=10**8))
    assert found.common_multiple_bytes == 35 * 196_608
    assert found.common_multiple_sequences == 10**8 // 196_608 // 35


def test_without_memory_nothing_is_said_of_how_many_fit() -> None:
    groups = groups_of((3, ATTENTION), (2, SLIDING))
    found = padded(groups, 1000, LengthFit(bytes=1, sequences=None, memory_bytes=None))
    assert found.equal_pages_sequences is None
    assert found.common_multiple_sequences is None


def test_states_alone_have_no_attention_to_grow() -> None:
    groups = groups_of((3, state(64)), (3, state(100)), block_tokens=8)
    rule = equal_pages(groups)
    assert rule is not None
    assert [kind.padding_bytes for kind in rule.kinds] == [400 - 256, 0]
    assert equal_blocks(groups, rule, 10) == 2 + 2


SPECS = st.one_of(
    st.builds(full, st.integers(1, 20)),
    st.builds(window, st.integers(1, 60), st.integers(0, 9), st.integers(1, 20)),
    st.builds(draft, st.integers(0, 5), st.integers(1, 20)),
    st.builds(state, st.integers(1, 900)),
)


@pytest.mark.parametrize("block_tokens", [4, 8])
@given(
    st.lists(st.tuples(st.integers(1, 7), SPECS), min_size=1, max_size=4),
    st.integers(1, 500),
)
def test_one_page_size_never_takes_less(
    block_tokens: int, kinds: list[tuple[int, Spec]], length: int
) -> None:
    groups = groups_of(*kinds, block_tokens=block_tokens)
    ours = sum(running_pages(group, length) * group.page_bytes for group in groups)
    found = padded(groups, length, LengthFit(bytes=ours, sequences=None, memory_bytes=None))
    assert found.equal_pages_bytes >= ours
    assert found.common_multiple_bytes >= ours
