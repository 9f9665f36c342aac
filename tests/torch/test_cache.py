"""What a paged cache refuses, what it leaves alone, and the layouts of known models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.torch.tiny import FAMILIES, prompt, tiny_model

from kvtide import ConfigError, KVManager, Layout, MemfdMemory, UsageError
from kvtide.layout import Buffer, FullSpec, IndexerSpec, LatentSpec, StateSpec, WindowSpec
from kvtide.torch import PagedCache, layout_from_model, page_view
from kvtide.torch.states import PagedStateLayer, StateView
from kvtide.torch.views import StatePages

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.torch.driver import Driver

every_family = pytest.mark.parametrize("family", FAMILIES)


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
        (
            {0: (IndexerSpec(dim=4, dtype="float32"), IndexerSpec(dim=8, dtype="float32"))},
            "layer 0 is in groups indexer, indexer_2",
        ),
        (
            {0: FullSpec(kv_heads=1, head_dim=4, dtype="int8")},
            "stores key_scale, value_scale, which .* kv_dtype and index_dtype of the model",
        ),
        (
            {0: FullSpec(kv_heads=1, head_dim=4, dtype="int4")},
            "stores key, key_scale, value, value_scale, which",
        ),
        ({0: LatentSpec(rank=128, rope_dim=4, dtype="fp8_ds_mla")}, "stores latent, which"),
        (
            {0: IndexerSpec(dim=8, dtype="float8_e4m3fn", scale_bytes=4)},
            "stores index_scale, which",
        ),
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
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([0])),
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
        layer = PagedStateLayer(StateView(pages, 0, ("conv", "conv_2", "recurrent")))
        states = pages.blank(1)
        layer.attach(states, is_started=False)
        assert layer.number_of_states == 3
        full = layer.update_conv_state(torch.ones(1, 2, 2), 2)
        assert full[0, 0].tolist() == [0, 1, 1]
        assert pages.part(states, 0, "conv_2")[0, 1].tolist() == [0, 1, 1]
        assert layer.has_previous_state == {0: False, 1: False, 2: True}
        assert layer.update_conv_state(torch.full((1, 2, 1), 5.0), 2).shape[-1] == 4
        with pytest.raises(UsageError, match=r"keeps conv, conv_2, recurrent .* needs 'conv_1'"):
            layer.update_conv_state(torch.ones(1, 2, 2), 1)
        with pytest.raises(ConfigError, match=r"state in torch.float64.* stores torch.float32"):
            layer.update_recurrent_state(torch.ones(1, 2, 3, dtype=torch.float64))
        assert pages.part(states, 0, "conv_2")[0, 1].tolist() == [1, 1, 5]
        layer.detach()
        with pytest.raises(UsageError, match="no forward is bound"):
            layer.update_recurrent_state(torch.ones(1, 2, 3))


@pytest.mark.parametrize("family", ["qwen3", "minimax"])
def test_gradients_are_refused(family: str, drive: Callable[..., Driver]) -> None:
    driver = drive(family)
    seq = driver.kv.open(prompt(5)[0].numpy())
    assert driver.kv.admit([seq])
    with (
        driver.kv.step([seq], 5) as step,
        pytest.raises(UsageError, match=r"keeps no gradients; .* torch.no_grad\(\)"),
        driver.cache.bind(step) as inputs,
    ):
        driver.model(prompt(5), cache=driver.cache, use_cache=True, **inputs)
