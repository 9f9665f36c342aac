"""Classes with encoders of other media, given text alone: the tokens of transformers' own cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.torch.held import held
from tests.torch.test_model_layout import LENGTH, counted
from tests.torch.tiny import WRAPPERS, expected, prompt, tiny_model

from kvtide.torch import layout_from_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.torch.driver import Driver

every_wrapper = pytest.mark.parametrize("family", WRAPPERS)


@every_wrapper
def test_chunks_batches_reuse_and_suspension(family: str, drive: Callable[..., Driver]) -> None:
    driver = drive(family)
    model, kv = driver.model, driver.kv
    prompts = [prompt(n, seed=n) for n in (37, 22)]
    seqs = [driver.start(ids, chunk=9) for ids in prompts]
    driver.decode(seqs, 5)
    kv.suspend([seqs[0]])
    driver.decode([seqs[1]], 4)
    assert kv.resume([seqs[0]])
    driver.prefill(seqs[0])
    driver.decode(seqs, 4)
    assert seqs[0].tokens[37:].tolist() == expected(model, prompts[0], 11)
    assert seqs[1].tokens[22:].tolist() == expected(model, prompts[1], 14)
    kv.close(seqs)
    ids = torch.cat([prompts[0][:, :32], prompt(9, seed=3)], 1)
    again = driver.start(ids)
    driver.decode([again], 7)
    assert again.hit >= 28
    assert again.tokens[41:].tolist() == expected(model, ids, 8)


@every_wrapper
def test_the_layout_is_what_transformers_caches(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        cache = model(prompt(LENGTH), use_cache=True).cache
    layout = layout_from_model(model, block_tokens=4)
    assert counted(layout, LENGTH) == {k: parts for k, parts in held(cache).items() if parts}
