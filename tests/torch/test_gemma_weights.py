"""Gemma 3 270M with its real weights: the same tokens as transformers' own cache, whatever happens.

Long enough that the window of 512 tokens passes over pages, in float32 as the demo runs it.
"""

from __future__ import annotations

import pydoc_data.topics
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.torch.driver import Driver

from kvtide import KVManager, MemfdMemory
from kvtide.engine import load_model
from kvtide.torch import PagedCache, layout_from_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtide.engine import Loaded

LOGIT_BOUND = 1e-2
"""Rounding of float32 over another batch shape; the logits themselves are around 20."""


@pytest.fixture(scope="module")
def gemma() -> Loaded:
    """The demo's model, from its package."""
    return load_model()


@pytest.fixture
def driver(gemma: Loaded) -> Iterator[Driver]:
    """Small granules and little memory, so that pools trade ground."""
    layout = layout_from_model(gemma.model, block_tokens=16, max_tokens=1024)
    memory = MemfdMemory(96 << 20, granule_bytes=128 << 10)
    with KVManager(layout, memory, max_sequences=4, max_tokens=1024) as kv:
        yield Driver(gemma.model, kv, PagedCache(kv))


def text(gemma: Loaded, topic: str, length: int) -> torch.Tensor:
    """Token ids [1, length] from Python's own documentation."""
    assert gemma.tokenizer is not None
    ids = gemma.tokenizer(pydoc_data.topics.topics[topic])["input_ids"]
    return torch.tensor([ids[:length]])


@torch.no_grad()
def expected(model: Any, ids: torch.Tensor, count: int) -> list[int]:
    """What `generate` with transformers' own cache answers."""
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
        min_new_tokens=count,
    )  # fmt: skip
    return out[0, ids.shape[1] :].tolist()


def test_gemma_through_everything_that_moves_pages(gemma: Loaded, driver: Driver) -> None:
    ids = text(gemma, "assignment", 620)
    want = expected(gemma.model, ids, 16)
    seq = driver.start(ids, chunk=256)
    driver.decode([seq], 3)
    child = driver.kv.fork(seq)
    assert child is not None
    assert driver.squeeze() > 0
    driver.decode([seq, child], 4)
    driver.kv.suspend([child])
    driver.decode([seq], 2)
    assert driver.kv.resume([child])
    driver.prefill(child)
    driver.squeeze()
    driver.decode([seq], 6)
    driver.decode([child], 7)
    assert seq.tokens[620:].tolist() == want
    assert child.tokens[620:].tolist() == want


def test_gemma_reuses_a_prefix_and_survives_eviction(gemma: Loaded, driver: Driver) -> None:
    first = text(gemma, "assignment", 600)
    seq = driver.start(first, chunk=256)
    driver.kv.close([seq])
    question = torch.cat([first[:, :592], text(gemma, "strings", 40)], dim=1)
    again = driver.start(question)
    assert again.hit >= 560
    driver.decode([again], 7)
    assert again.tokens[632:].tolist() == expected(gemma.model, question, 8)
    with torch.no_grad():
        known = torch.from_numpy(again.tokens[:-1].astype("int64"))[None]
        plain = gemma.model(known, use_cache=False).logits[0, -1]
    torch.testing.assert_close(driver.logits[id(again)], plain, rtol=0, atol=LOGIT_BOUND)
