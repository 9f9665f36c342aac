"""What a paged cache refuses, what it leaves alone, and the layouts of known models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.torch.tiny import FAMILIES, prompt, tiny_model
from transformers import AutoConfig

from kvtide import ConfigError, KVManager, Layout, MemfdMemory, UsageError
from kvtide.layout import Buffer, FullSpec, IndexerSpec, StateSpec, WindowSpec
from kvtide.torch import PagedCache, layout_from_model, page_view
from kvtide.torch.layers import PagedStateLayer
from kvtide.torch.views import StatePages

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.torch.driver import Driver
    from transformers.cache_utils import DynamicCache

every_family = pytest.mark.parametrize("family", FAMILIES)


def shapes_of(cache: DynamicCache, layer: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What transformers' own cache holds of one token (or state) in one layer."""
    held = cache.layers[layer]
    if hasattr(held, "recurrent_states"):
        conv, recurrent = held.conv_states[0], held.recurrent_states[0]
        return {
            "conv": (tuple(conv.shape[1:]), conv.dtype),
            "recurrent": (tuple(recurrent.shape[1:]), recurrent.dtype),
        }
    if getattr(held, "keys", None) is None:
        return {}
    names = ("latent", "rope") if hasattr(held, "indexer_keys") else ("key", "value")
    shapes = {
        name: ((held_.shape[1], held_.shape[3]), held_.dtype)
        for name, held_ in zip(names, (held.keys, held.values), strict=True)
    }
    if names == ("latent", "rope"):
        shapes = {name: (shape[1:], dtype) for name, (shape, dtype) in shapes.items()}
        shapes["index_key"] = ((held.indexer_keys.shape[2],), held.indexer_keys.dtype)
    return shapes


@every_family
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_layout_is_what_transformers_caches(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype)
    with torch.no_grad():
        cache = model(prompt(24), use_cache=True).cache
    layout = layout_from_model(model, block_tokens=4)
    for layer in range(len(cache.layers)):
        stored = {
            buffer.name: (buffer.shape, getattr(torch, buffer.dtype))
            for group in layout.groups
            if layer in group.layers
            for buffer in group.buffers
        }
        assert stored == shapes_of(cache, layer)


def test_windows_and_state_intervals() -> None:
    model = tiny_model("gemma3_text")
    assert [g.name for g in layout_from_model(model, block_tokens=4).groups] == [
        "window_16",
        "full",
    ]
    short = layout_from_model(model, block_tokens=4, max_tokens=16)
    assert [g.name for g in short.groups] == ["full"]
    hybrid = layout_from_model(tiny_model("qwen3_next"), block_tokens=12)
    assert hybrid.group("state").lifetime.interval_tokens == 252  # type: ignore[union-attr]


def test_a_configuration_alone_is_enough_with_a_dtype() -> None:
    config = tiny_model("qwen3").config
    layout = layout_from_model(config, block_tokens=4, dtype="bfloat16")
    assert layout.bytes_per_token == 3 * 2 * 2 * 16 * 2
    config = AutoConfig.for_model("qwen3")
    with pytest.raises(ConfigError, match="dtype is None; pass dtype"):
        layout_from_model(config, block_tokens=4)


def test_unknown_models_are_named() -> None:
    with pytest.raises(ConfigError, match="model_type is 'llama'; layouts are known for"):
        layout_from_model(AutoConfig.for_model("llama"), block_tokens=4, dtype="float32")
    config = AutoConfig.for_model("qwen3", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ConfigError, match="layer_types of 'qwen3' has 'linear_attention'"):
        layout_from_model(config, block_tokens=4, dtype="float32")
    config = AutoConfig.for_model("qwen3", num_hidden_layers=1)
    config.num_key_value_heads = None
    with pytest.raises(ConfigError, match="num_key_value_heads of 'qwen3' is None"):
        layout_from_model(config, block_tokens=4, dtype="float32")


def manager(layout: Layout) -> KVManager:
    memory = MemfdMemory(1 << 20, granule_bytes=4096)
    return KVManager(layout, memory, max_sequences=4, max_tokens=64)


def test_a_layout_of_another_model_is_refused() -> None:
    model = tiny_model("qwen3")
    wrong = {i: FullSpec(kv_heads=2, head_dim=8, dtype="float64") for i in range(3)}
    with manager(Layout.from_layers(wrong, block_tokens=4)) as kv, torch.no_grad():
        seq = kv.open([5, 6, 7])
        assert kv.admit([seq])
        cache = PagedCache(kv)
        with (
            kv.step([seq], 3) as step,
            pytest.raises(UsageError, match=r"\(3, 32\).*\(3, 16\)"),
            cache.bind(step),
        ):
            model(torch.tensor([[5, 6, 7]]), cache=cache)


def test_another_dtype_is_refused() -> None:
    model = tiny_model("qwen3")
    layout = layout_from_model(model, block_tokens=4, dtype="float32")
    with manager(layout) as kv, torch.no_grad():
        seq = kv.open([5, 6, 7])
        assert kv.admit([seq])
        cache = PagedCache(kv)
        with (
            kv.step([seq], 3) as step,
            pytest.raises(ConfigError, match=r"writes torch.float64.* stores torch.float32"),
            cache.bind(step),
        ):
            model(torch.tensor([[5, 6, 7]]), cache=cache)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({0: WindowSpec(window=8, sinks=2, kv_heads=1, head_dim=4, dtype="float32")}, "2 sink"),
        ({0: IndexerSpec(dim=4, dtype="float32")}, "layer 0 is in groups indexer"),
        (
            {
                0: (
                    FullSpec(kv_heads=1, head_dim=4, dtype="float32"),
                    FullSpec(kv_heads=2, head_dim=4, dtype="float32"),
                )
            },
            "layer 0 is in groups full, full_2",
        ),
    ],
)
def test_layouts_no_model_can_use_are_refused(layers: dict[int, FullSpec], words: str) -> None:
    with (
        manager(Layout.from_layers(layers, block_tokens=4)) as kv,
        pytest.raises(ConfigError, match=words),
    ):
        PagedCache(kv)


def test_forwards_do_not_nest(drive: Callable[..., Driver]) -> None:
    driver = drive("qwen3")
    seq = driver.start(prompt(6))
    with driver.kv.step([seq], 1) as step, driver.cache.bind(step):
        with (
            pytest.raises(UsageError, match="bound already"),
            driver.cache.bind(step),
        ):
            pass
        assert driver.cache.get_seq_length() == 6
    assert driver.cache.get_seq_length() == 0


@every_family
def test_verbs_of_the_manager_are_refused(family: str, drive: Callable[..., Driver]) -> None:
    cache = drive(family).cache
    for verb in (
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache(torch.tensor([0])),
        cache.reset,
    ):
        with pytest.raises(UsageError, match="KVManager"):
            verb()
    assert not cache.is_compileable
    assert not cache.is_croppable


def test_states_do_not_take_uneven_rows(drive: Callable[..., Driver]) -> None:
    driver = drive("nemotron_h")
    seqs = [driver.kv.open(prompt(n)[0].numpy()) for n in (6, 9)]
    assert driver.kv.admit(seqs)
    with pytest.raises(UsageError, match="'state' holds state: all sequences"):
        driver.run(seqs, [6, 9])


def test_an_exception_leaves_the_state_as_it_was(drive: Callable[..., Driver]) -> None:
    driver = drive("qwen3_next")
    seq = driver.start(prompt(9))
    group = driver.kv.layout.group("state")
    view = page_view(driver.kv.pools["state"], group, layer_position=0, name="recurrent")
    page = int(driver.kv.tables["state"].rows[seq.row, 0])
    before = view[page].clone()

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    hook = driver.model.lm_head.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        driver.run([seq], 1)
    hook.remove()
    assert view[page].equal(before)


def test_padding_never_writes(drive: Callable[..., Driver]) -> None:
    driver = drive("gemma3_text")
    seqs = [driver.kv.open(prompt(n, seed=n)[0].numpy()) for n in (5, 21)]
    assert driver.kv.admit(seqs)
    driver.run(seqs, [5, 21])
    driver.decode(seqs, 3)
    for name, pool in driver.kv.pools.items():
        for position in range(len(driver.kv.layout.group(name).layers)):
            for buffer in ("key", "value"):
                group = driver.kv.layout.group(name)
                view = page_view(pool, group, layer_position=position, name=buffer)
                assert not view[0].any(), "the sink page was written"


def test_states_of_several_kinds_in_one_layer() -> None:
    spec = StateSpec(
        buffers=tuple(Buffer(n, (2, 3), "float32") for n in ("conv", "conv_2", "recurrent")),
        interval_tokens=4,
    )
    with manager(Layout.from_layers({0: spec}, block_tokens=4)) as kv:
        pages = StatePages(kv.pools["state"], kv.layout.groups[0])
        layer = PagedStateLayer(pages, 0, ("conv", "conv_2", "recurrent"))
        states = pages.blank(1)
        layer.attach(states, is_started=False)
        assert layer.number_of_states == 2
        full = layer.update_conv_state(torch.ones(1, 2, 2), 1)
        assert full[0, 0].tolist() == [0, 1, 1]
        assert pages.part(states, 0, "conv_2")[0, 1].tolist() == [0, 1, 1]
        assert layer.has_previous_state == {0: False, 1: True}
        assert layer.update_conv_state(torch.full((1, 2, 1), 5.0), 1).shape[-1] == 4
        assert pages.part(states, 0, "conv_2")[0, 1].tolist() == [1, 1, 5]
        layer.detach()
        with pytest.raises(UsageError, match="no forward is bound"):
            layer.update_recurrent_state(torch.ones(1, 2, 3))
