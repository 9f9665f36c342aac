"""Which sequences may share a model call, and what happens when they may not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.torch.tiny import prompt, tiny_model

from kvtide import ConfigError, KVManager, Layout, MemfdMemory, UsageError
from kvtide.layout import FullSpec, IndexerSpec, WindowSpec
from kvtide.torch import PagedCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.torch.driver import Driver
    from transformers import PreTrainedModel

    from kvtide.layout import Spec

    Drive = Callable[..., Driver]


@pytest.mark.parametrize(
    ("family", "calls"),
    [
        ("gemma3_text", [[0, 1, 2, 5], [3, 4]]),
        ("nemotron_h", [[0, 5], [1, 2], [3, 4]]),
        ("minimax_m3_vl_text", [[0, 5], [2], [1], [3], [4]]),
        ("deepseek_v4", [[0, 5], [2], [1], [3], [4]]),
    ],
)
def test_split(family: str, calls: list[list[int]], drive: Drive) -> None:
    cache = drive(family).cache
    starts, num_new = np.array([0, 9, 5, 6, 7, 0]), np.array([1, 1, 1, 4, 4, 1])
    assert [rows.tolist() for rows in cache.split(starts, num_new)] == calls
    assert cache.split(starts[:0], num_new[:0]) == []


@pytest.mark.parametrize("family", ["deepseek_v4", "minimax_m3_vl_text"])
def test_rows_that_must_be_alike_are_refused_apart(family: str, drive: Drive) -> None:
    driver = drive(family)
    seqs = [driver.start(prompt(n, seed=n)) for n in (6, 9)]
    with (
        driver.kv.step(seqs, 1) as step,
        pytest.raises(UsageError, match=r"starts \[6 9\] and num_new \[1 1\]; bind them apart"),
        driver.cache.bind(step),
    ):
        pass


def test_without_the_model_padding_is_refused_when_it_would_matter(drive: Drive) -> None:
    driver = drive("minimax_m3_vl_text")
    driver.cache = PagedCache(driver.kv)
    seqs = [driver.start(prompt(n, seed=n)) for n in (6, 9)]
    assert not driver.cache.needs_equal_rows
    with pytest.raises(UsageError, match=r"padding would shift its blocks.* give PagedCache the"):
        driver.decode(seqs, 1)


def test_new_sequences_and_others_do_not_mix_where_there_is_state(drive: Drive) -> None:
    driver = drive("qwen4_exp_text")
    old, new = driver.start(prompt(6)), driver.kv.open(prompt(1)[0].numpy())
    assert driver.kv.admit([new])
    with pytest.raises(UsageError, match=r"a past, or without one, got starts \[6 0\]"):
        driver.run([old, new], 1)


def test_minimax_has_no_state_before_the_first_token(drive: Drive) -> None:
    driver = drive("minimax")
    cache = driver.cache
    seq = driver.kv.open(prompt(4)[0].numpy())
    assert driver.kv.admit([seq])
    with driver.kv.step([seq], 4) as step, cache.bind(step):
        assert cache.get_linear_cache(0) is None
        cache.set_linear_cache(0, torch.ones(1, 4, 16, 16, dtype=torch.float64))
        cache.set_linear_cache(2, torch.zeros(1, 4, 16, 16, dtype=torch.float64))
    driver.kv.commit([seq], [5])
    with driver.kv.step([seq], 1) as step, cache.bind(step):
        assert cache.get_linear_cache(0).unique().tolist() == [1]
    assert len(cache) == 3
    assert type(cache).__name__ == "MiniMaxPagedCache"
    assert isinstance(cache, PagedCache)


def test_latents_without_rotary_keys_come_with_none(drive: Drive) -> None:
    driver = drive("mistral_large4")
    seq = driver.start(prompt(5))
    latent = torch.ones(1, 1, 1, 16, dtype=torch.float64)
    with driver.kv.step([seq], 1) as step, driver.cache.bind(step):
        found, rope = driver.cache.update(latent, latent[..., :0], 3)
    assert (found.shape, rope.shape) == ((1, 1, 6, 16), (1, 1, 6, 0))
    assert found[0, 0, -1].unique().tolist() == [1]


def failing_update(model: PreTrainedModel, layers: dict[int, Spec]) -> None:
    """One forward of `model` over a layout of these layers."""
    layout = Layout.from_layers(layers, block_tokens=4)
    memory = MemfdMemory(1 << 20, granule_bytes=4096)
    with KVManager(layout, memory, max_sequences=4, max_tokens=64) as kv, torch.no_grad():
        seq = kv.open([5, 6, 7])
        assert kv.admit([seq])
        cache = PagedCache(kv, model)
        with kv.step([seq], 3) as step, cache.bind(step) as inputs:
            model(torch.tensor([[5, 6, 7]]), cache=cache, **inputs)


def test_keys_alone_are_refused_if_the_model_has_values() -> None:
    spec = FullSpec(kv_heads=2, head_dim=16, dtype="float64", is_tied=True)
    with pytest.raises(UsageError, match="one tensor of this layer and the model caches two"):
        failing_update(tiny_model("qwen3"), dict.fromkeys(range(3), spec))


def test_index_keys_alone_are_refused_if_the_model_has_keys() -> None:
    spec = IndexerSpec(dim=16, dtype="float64")
    with pytest.raises(UsageError, match="keeps no keys and values of this layer"):
        failing_update(tiny_model("qwen3"), dict.fromkeys(range(3), spec))


def test_shares_of_a_block_are_refused() -> None:
    spec = WindowSpec(window=8, kv_heads=1, head_dim=4, dtype="float32")
    layout = Layout.from_layers({0: spec}, block_tokens=4, context=2)
    memory = MemfdMemory(1 << 20, granule_bytes=4096)
    with (
        KVManager(layout, memory, max_sequences=4, max_tokens=64) as kv,
        pytest.raises(ConfigError, match="context of group 'window_8' is 2; a model in one"),
    ):
        PagedCache(kv)
