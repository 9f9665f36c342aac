"""Bytes of tokens, pages and states worked out by hand, and how layers become groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtide.errors import ConfigError
from kvtide.layout import (
    ITEM_BYTES,
    Buffer,
    DraftSpec,
    Full,
    FullSpec,
    IndexerSpec,
    LatentSpec,
    LayerGroup,
    Layout,
    State,
    StateSpec,
    Window,
    WindowSpec,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def full(**changes: object) -> FullSpec:
    fields: dict[str, object] = {"kv_heads": 2, "head_dim": 8, "dtype": "float32"}
    return FullSpec(**(fields | changes))  # type: ignore[arg-type]


def window(tokens: int, **changes: object) -> WindowSpec:
    fields: dict[str, object] = {"kv_heads": 2, "head_dim": 8, "dtype": "float32"}
    return WindowSpec(window=tokens, **(fields | changes))  # type: ignore[arg-type]


def test_32_layers_of_8_heads_at_fp16_take_131072_bytes_a_token() -> None:
    spec = FullSpec(kv_heads=8, head_dim=128, dtype="float16")
    layout = Layout.from_layers(dict.fromkeys(range(32), spec), block_tokens=16)
    assert layout.bytes_per_token == 131_072
    assert round(5_000_000_000 / layout.bytes_per_token) == 38_147
    assert layout.group("full").page_bytes == 16 * 131_072


@pytest.mark.parametrize(
    ("dtype", "item_bytes"),
    [
        ("float64", 8),
        ("float32", 4),
        ("float16", 2),
        ("bfloat16", 2),
        ("float8_e4m3fn", 1),
        ("float8_e5m2", 1),
        ("int8", 1),
        ("uint8", 1),
        ("int32", 4),
    ],
)
def test_dtype_bytes(dtype: str, item_bytes: int) -> None:
    assert ITEM_BYTES[dtype] == item_bytes
    assert Buffer("x", (3, 5), dtype).bytes == 15 * item_bytes


def test_bytes_of_each_kind_of_layer() -> None:
    assert full(v_head_dim=4).bytes_per_token == 2 * (8 + 4) * 4
    assert window(16).bytes_per_token == 2 * (8 + 8) * 4
    # DeepSeek-V3: 512 latent + 64 rope at bf16.
    assert LatentSpec(rank=512, rope_dim=64, dtype="bfloat16").bytes_per_token == 1_152
    # Its indexer at fp8: 128 keys and one fp32 scale.
    fp8 = IndexerSpec(dim=128, dtype="float8_e4m3fn", scale_bytes=4)
    assert fp8.bytes_per_token == 132
    draft = DraftSpec(FullSpec(kv_heads=2, head_dim=8, dtype="float32"), look_ahead=3)
    assert draft.bytes_per_token == 128


def test_state_counts_whole_shapes() -> None:
    conv = Buffer("conv", (192, 4), "bfloat16")
    recurrent = Buffer("recurrent", (8, 16, 16), "float32")
    spec = StateSpec(buffers=(conv, recurrent), interval_tokens=64)
    assert spec.bytes_per_state == 192 * 4 * 2 + 8 * 16 * 16 * 4
    group = Layout.from_layers({0: spec, 2: spec}, block_tokens=16).group("state")
    assert group.page_bytes == group.bytes_per_state == 2 * spec.bytes_per_state
    assert group.bytes_per_token is None
    assert group.lifetime == State(64)


def test_page_is_layer_then_buffer_then_token() -> None:
    group = Layout.from_layers({3: full(), 5: full()}, block_tokens=4).group("full")
    side = 4 * 2 * 8 * 4  # tokens, heads, dims, bytes
    assert group.layers == (3, 5)
    assert [group.offset(i, b) for i in (0, 1) for b in ("key", "value")] == [
        0,
        side,
        2 * side,
        3 * side,
    ]
    assert group.page_bytes == 4 * side


def test_buffers_start_at_multiples_of_16_bytes() -> None:
    spec = IndexerSpec(dim=5, dtype="int8", scale_bytes=3)
    group = Layout.from_layers({0: spec, 1: spec}, block_tokens=3).group("indexer")
    # 3 tokens of 5 bytes pad to 16, 3 of 3 bytes pad to 16.
    assert group.offset(0, "index_scale") == 16
    assert group.offset(1, "index_key") == 32
    assert group.page_bytes == 64
    assert group.bytes_per_token == 2 * 8


def test_equal_specs_share_a_group_and_others_get_their_own() -> None:
    layout = Layout.from_layers(
        {0: window(16), 1: full(), 2: window(16), 3: full(kv_heads=4), 4: window(32)},
        block_tokens=4,
    )
    assert [(g.name, g.layers) for g in layout.groups] == [
        ("window_16", (0, 2)),
        ("full", (1,)),
        ("full_2", (3,)),
        ("window_32", (4,)),
    ]


def test_value_width_that_says_the_default_is_no_difference() -> None:
    layout = Layout.from_layers({0: full(), 1: full(v_head_dim=8)}, block_tokens=4)
    assert [g.layers for g in layout.groups] == [(0, 1)]


def test_a_layer_may_store_several_things() -> None:
    indexer = IndexerSpec(dim=16, dtype="float32")
    layout = Layout.from_layers({0: (full(), indexer), 1: (full(), indexer)}, block_tokens=4)
    assert [(g.name, g.layers) for g in layout.groups] == [("full", (0, 1)), ("indexer", (0, 1))]


def test_sinks_make_another_group() -> None:
    layout = Layout.from_layers({0: window(16), 1: window(16, sinks=4)}, block_tokens=4)
    assert [g.lifetime for g in layout.groups] == [Window(16), Window(16, 4)]
    assert [g.name for g in layout.groups] == ["window_16", "window_16_2"]


def test_cv_3_a_window_as_long_as_the_maximum_is_full_attention() -> None:
    layers = {0: full(), 1: window(32_768), 2: window(512)}
    for max_tokens in (512, 511):
        layout = Layout.from_layers(layers, block_tokens=16, max_tokens=max_tokens)
        assert [(g.name, g.lifetime, g.layers) for g in layout.groups] == [
            ("full", Full(), (0, 1, 2))
        ]
    split = Layout.from_layers(layers, block_tokens=16, max_tokens=513)
    assert [(g.name, g.layers) for g in split.groups] == [("full", (0, 1)), ("window_512", (2,))]


def test_an_indexer_window_is_normalised_too() -> None:
    layers = {
        0: IndexerSpec(dim=16, dtype="float32"),
        1: IndexerSpec(dim=16, dtype="float32", window=64),
    }
    assert len(Layout.from_layers(layers, block_tokens=4, max_tokens=64).groups) == 1
    assert len(Layout.from_layers(layers, block_tokens=4, max_tokens=65).groups) == 2


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: full(dtype="float31"), ["dtype", "float31", "use one of"]),
        (lambda: full(kv_heads=0), ["kv_heads", "0"]),
        (lambda: full(head_dim=-8), ["head_dim", "-8"]),
        (lambda: full(v_head_dim=0), ["v_head_dim", "0"]),
        (lambda: window(0), ["window", "0"]),
        (lambda: window(4, sinks=-1), ["sinks", "-1"]),
        (lambda: LatentSpec(rank=0, rope_dim=8, dtype="float32"), ["rank", "0"]),
        (lambda: LatentSpec(rank=8, rope_dim=8, dtype="fp4"), ["dtype", "fp4"]),
        (lambda: IndexerSpec(dim=0, dtype="float32"), ["dim", "0"]),
        (lambda: IndexerSpec(dim=8, dtype="float32", window=0), ["window", "0"]),
        (lambda: IndexerSpec(dim=8, dtype="float32", scale_bytes=-4), ["scale_bytes", "-4"]),
        (lambda: StateSpec(buffers=(), interval_tokens=16), ["buffers"]),
        (lambda: Buffer("conv", (4, 0), "float32"), ["shape", "conv", "(4, 0)"]),
        (
            lambda: DraftSpec(FullSpec(kv_heads=1, head_dim=8, dtype="int8"), look_ahead=-1),
            ["look_ahead", "-1"],
        ),
        (lambda: Layout.from_layers({}, block_tokens=16), ["layers", "empty"]),
        (lambda: Layout.from_layers({0: full()}, block_tokens=0), ["block_tokens", "0"]),
        (
            lambda: Layout.from_layers({0: full()}, block_tokens=4, max_tokens=0),
            ["max_tokens", "0"],
        ),
        (lambda: Layout.from_layers({0: (full(), full())}, block_tokens=4), ["layers", "(0, 0)"]),
    ],
)
def test_impossible_layouts_are_refused(build: Callable[[], object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert all(word in str(caught.value) for word in words)


def test_a_state_interval_off_the_block_grid_is_refused() -> None:
    spec = StateSpec(buffers=(Buffer("s", (4,), "float32"),), interval_tokens=24)
    with pytest.raises(ConfigError, match="multiple of block_tokens = 16"):
        Layout.from_layers({0: spec}, block_tokens=16)


def test_unknown_names_say_what_there_is() -> None:
    layout = Layout.from_layers({0: full()}, block_tokens=4)
    with pytest.raises(ConfigError, match="no group 'latent'; it has full"):
        layout.group("latent")
    with pytest.raises(ConfigError, match="no buffer 'rope'; it has key, value"):
        layout.group("full").offset(0, "rope")
    with pytest.raises(ConfigError, match="layer_position 1"):
        layout.group("full").offset(1, "key")


def test_a_group_with_another_block_size_is_refused() -> None:
    group = LayerGroup(
        name="full", lifetime=Full(), layers=(0,), buffers=full().buffers, block_tokens=8
    )
    with pytest.raises(ConfigError, match="is 8; use the layout's 4"):
        Layout(block_tokens=4, groups=(group,))
    same = Layout(block_tokens=8, groups=(group,))
    with pytest.raises(ConfigError, match="groups are"):
        Layout(block_tokens=8, groups=(*same.groups, group))
