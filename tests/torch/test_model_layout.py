"""The layout of a model is what transformers' own cache of it holds, to the byte."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from tests.torch.held import Held, held
from tests.torch.tiny import FAMILIES, FOLD, prompt, tiny_model
from transformers import AutoConfig

from kvtide import ConfigError
from kvtide.layout import State, Window
from kvtide.torch import layout_from_model, page_view

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.torch.driver import Driver

    from kvtide import Layout
    from kvtide.layout import LayerGroup

every_family = pytest.mark.parametrize("family", FAMILIES)

LENGTH = 39
"""Outgrows every window, and leaves one token too few for the next entry of DeepSeek-V4."""


def layout_of(family: str, dtype: torch.dtype = torch.float64) -> Layout:
    return layout_from_model(tiny_model(family, dtype), block_tokens=FOLD.get(family, 4))


def count(group: LayerGroup, length: int) -> int:
    """Entries that a group keeps of a sequence of this many tokens."""
    match group.lifetime:
        case State():
            return 1
        case Window(tokens):
            return min(length, tokens - 1)  # the next token brings itself along
        case _:
            return length // group.ratio


def counted(layout: Layout, length: int) -> dict[int, dict[str, Held]]:
    """What a layout says is held of a sequence, in the same words as `held`."""
    layers: dict[int, dict[str, Held]] = {}
    for group in layout.groups:
        for layer in group.layers:
            for buffer in group.buffers:
                dtype = getattr(torch, buffer.dtype)
                found = Held(buffer.shape, dtype, count(group, length))
                assert buffer.name not in layers.setdefault(layer, {})
                layers[layer][buffer.name] = found
    return layers


@every_family
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_layout_is_what_transformers_caches(family: str, dtype: torch.dtype) -> None:
    with torch.no_grad():
        cache = tiny_model(family, dtype)(prompt(LENGTH), use_cache=True).cache
    layout = layout_of(family, dtype)
    theirs = {layer: parts for layer, parts in held(cache).items() if parts}
    assert counted(layout, LENGTH) == theirs
    total = sum(part.bytes for parts in theirs.values() for part in parts.values())
    assert total == sum(bytes_of(group, LENGTH) for group in layout.groups)


def bytes_of(group: LayerGroup, length: int) -> float:
    """Bytes of a sequence in one group, from the numbers the layout publishes."""
    if group.bytes_per_state is not None:
        return group.bytes_per_state
    assert group.bytes_per_token is not None
    return group.bytes_per_token * group.ratio * count(group, length)


@every_family
def test_the_model_writes_what_the_layout_counts(family: str, drive: Callable[..., Driver]) -> None:
    driver = drive(family, state_interval=64, mode="static")
    kv = driver.kv
    for name, facts in kv.snapshot().pools.items():
        kv.pools[name].arena.buffer()[: facts.mapped_bytes] = b"\xa5" * facts.mapped_bytes
    driver.start(prompt(LENGTH))  # in one forward, so no page of a window is used again
    for group in kv.layout.groups:
        if not group.is_state:
            assert group.bytes_per_token is not None
            entries = LENGTH // group.ratio
            assert written_bytes(driver, group) == entries * group.bytes_per_token * group.ratio


def written_bytes(driver: Driver, group: LayerGroup) -> int:
    """Bytes of elements that are not as they were filled, over all mapped pages of a group."""
    pages = driver.kv.snapshot().pools[group.name].pages
    total = 0
    for position in range(len(group.layers)):
        for buffer in group.buffers:
            pool = driver.kv.pools[group.name]
            view = page_view(pool, group, layer_position=position, name=buffer.name)[:pages]
            filled = torch.full((view.element_size(),), 0xA5, dtype=torch.uint8).view(view.dtype)
            total += int((view != filled).sum()) * view.element_size()
    return total


def test_windows_and_state_intervals() -> None:
    model = tiny_model("gemma3_text")
    assert [g.name for g in layout_from_model(model, block_tokens=4).groups] == [
        "window_16",
        "full",
    ]
    short = layout_from_model(model, block_tokens=4, max_tokens=16)
    assert [g.name for g in short.groups] == ["full"]
    hybrid = layout_from_model(tiny_model("qwen3_next"), block_tokens=12)
    assert hybrid.group("state").lifetime.interval_tokens == 1020  # type: ignore[union-attr]


def test_states_are_as_transformers_keeps_them_not_other_engines() -> None:
    config = copy.deepcopy(tiny_model("nemotron_h").config)
    config.mamba_ssm_cache_dtype = "bfloat16"
    layout = layout_from_model(config, block_tokens=4, dtype="float64")
    assert layout == layout_of("nemotron_h")
    assert {b.name: b.dtype for b in layout.group("state").buffers}["recurrent"] == "float32"


def test_latents_and_index_keys_have_pools_of_their_own() -> None:
    layout = layout_from_model(tiny_model("deepseek_v32"), block_tokens=4)
    assert {g.name: [b.name for b in g.buffers] for g in layout.groups} == {
        "latent": ["latent", "rope"],
        "indexer": ["index_key"],
    }


def test_a_configuration_alone_is_enough_with_a_dtype() -> None:
    config = tiny_model("qwen3").config
    layout = layout_from_model(config, block_tokens=4, dtype="bfloat16")
    assert layout.bytes_per_token == 3 * 2 * 2 * 16 * 2
    config = AutoConfig.for_model("qwen3")
    with pytest.raises(ConfigError, match="dtype is None; pass dtype"):
        layout_from_model(config, block_tokens=4)


def test_unknown_models_are_named() -> None:
    with pytest.raises(ConfigError, match="model_type is 'bloom', which is not among"):
        layout_from_model(AutoConfig.for_model("bloom"), block_tokens=4, dtype="float32")
    config = AutoConfig.for_model("qwen3", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ConfigError, match=r"layer_types of .*'linear"):
        layout_from_model(config, block_tokens=4, dtype="float32")


@pytest.mark.parametrize("how", [True, "all"])
def test_models_whose_tokens_read_ahead_are_refused(how: object) -> None:
    name = "gemma4_text" if how == "all" else "gemma"
    config = AutoConfig.for_model(name, use_bidirectional_attention=how)
    with pytest.raises(ConfigError, match=f"use_bidirectional_attention of '{name}' is {how!r}"):
        layout_from_model(config, block_tokens=4, dtype="float32")
    with pytest.raises(ConfigError, match="'gemma' is True: a prompt's tokens"):
        layout_from_model(AutoConfig.for_model("paligemma"), block_tokens=4, dtype="float32")
    config = AutoConfig.for_model("gemma4_text", use_bidirectional_attention="vision")
    assert layout_from_model(config, block_tokens=4, dtype="float32").bytes_per_token
