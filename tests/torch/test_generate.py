"""`model.generate` over pages: plain batches, padding, continuation, endings."""

from __future__ import annotations

import pytest
import torch
from tests.torch.tiny import (
    EQUAL_ROWS,
    FAMILIES,
    PADDED_DTYPES,
    expected,
    prompt,
    tiny_model,
)

from kvtide import CapacityError, KVManager, MemfdMemory, UsageError
from kvtide.torch import PagedCache, layout_from_model

every_family = pytest.mark.parametrize("family", FAMILIES)
MEMORY = 32 << 20


def left_padded(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask of prompts padded on the left with token 0."""
    width = max(lengths)
    ids = torch.zeros((len(lengths), width), dtype=torch.int64)
    for i, n in enumerate(lengths):
        ids[i, width - n :] = prompt(n, seed=n)
    return ids, (ids != 0).long()


@every_family
def test_one_prompt(family: str) -> None:
    model, ids = tiny_model(family), prompt(40)
    with PagedCache.for_generate(model, MEMORY) as cache:
        out = model.generate(ids, cache=cache, max_new_tokens=20, do_sample=False)
    assert out[0, 40:].tolist() == expected(model, ids, 20)


# MiniMax's own cache asks its first layer how many tokens there are, which keeps none, and so its
# mask shows the padding: only rows on their own are right.
@every_family
def test_left_padded_batch(family: str) -> None:
    model = tiny_model(family, PADDED_DTYPES.get(family, torch.float64))
    lengths = (33, 12, 20)
    ids, mask = left_padded(lengths)
    settings = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    with PagedCache.for_generate(model, MEMORY) as cache:
        out = model.generate(ids, cache=cache, **settings)
    if family != "minimax":
        assert out.equal(model.generate(ids, **settings))
    if family not in EQUAL_ROWS:
        for row, n in zip(out, lengths, strict=True):
            assert row[33:].tolist() == expected(model, prompt(n, seed=n), 20)


@every_family
def test_prompt_in_chunks(family: str) -> None:
    model, ids = tiny_model(family), prompt(40)
    with PagedCache.for_generate(model, MEMORY) as cache:
        out = model.generate(
            ids, cache=cache, max_new_tokens=9, do_sample=False, prefill_chunk_size=16
        )
    assert out[0, 40:].tolist() == expected(model, ids, 9)


@every_family
def test_a_second_call_continues(family: str) -> None:
    model, ids = tiny_model(family), prompt(24)
    with PagedCache.for_generate(model, MEMORY) as cache:
        first = model.generate(ids, cache=cache, max_new_tokens=8, do_sample=False)
        longer = torch.cat([first, prompt(7, seed=3)], 1)
        mask = torch.ones_like(longer)  # else an answer's padding token would count as padding
        second = model.generate(
            longer, attention_mask=mask, cache=cache, max_new_tokens=8, do_sample=False
        )
    assert second[0, longer.shape[1] :].tolist() == expected(model, longer, 8)


def test_sampling_with_returned_sequences() -> None:
    model, ids = tiny_model("gemma3_text"), prompt(20)
    settings = {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(7)
    want = model.generate(ids, **settings)
    torch.manual_seed(7)
    with PagedCache.for_generate(model, MEMORY) as cache:
        assert model.generate(ids, cache=cache, **settings).equal(want)


def test_inference_mode_and_back() -> None:
    model, ids = tiny_model("qwen3_next"), prompt(12)
    with PagedCache.for_generate(model, MEMORY) as cache:
        with torch.inference_mode():
            first = model.generate(ids, cache=cache, max_new_tokens=5, do_sample=False)
        longer = torch.cat([first.clone(), prompt(9, seed=3)], 1)
        second = model.generate(longer, cache=cache, max_new_tokens=5, do_sample=False)
    assert second[0, longer.shape[1] :].tolist() == expected(model, longer, 5)


def manager() -> KVManager:
    layout = layout_from_model(tiny_model("gemma3_text"), block_tokens=4)
    return KVManager(
        layout, MemfdMemory(1 << 20, granule_bytes=4096), max_sequences=4, max_tokens=96
    )


def test_a_given_manager_stays_open_and_gets_its_pages_back() -> None:
    model = tiny_model("gemma3_text")
    with manager() as kv:
        for seed in (1, 2):
            ids = prompt(30, seed=seed)
            with PagedCache.for_generate(model, kv) as cache:
                out = model.generate(ids, cache=cache, max_new_tokens=8, do_sample=False)
                assert any(pool.used for pool in kv.snapshot().pools.values())
            assert out[0, 30:].tolist() == expected(model, ids, 8)
            assert not any(pool.used for pool in kv.snapshot().pools.values())
            kv.check()


def test_rows_with_equal_placeholders_never_share() -> None:
    model = tiny_model("gemma3_text")
    ids = torch.cat([prompt(24, seed=1), prompt(24, seed=2)])
    with manager() as kv:
        for _ in range(2):
            with PagedCache.for_generate(model, kv) as cache:
                out = model.generate(ids, cache=cache, max_new_tokens=8, do_sample=False)
            for row, seed in enumerate((1, 2)):
                want = expected(model, prompt(24, seed=seed), 8)
                assert out[row, 24:].tolist() == want
        assert kv.snapshot().hit_tokens == 0


def test_reset_starts_another_batch() -> None:
    model = tiny_model("qwen3")
    with PagedCache.for_generate(model, MEMORY) as cache:
        model.generate(prompt(9), cache=cache, max_new_tokens=3, do_sample=False)
        with pytest.raises(UsageError, match="called with 2 rows, the cache holds 1"):
            model(torch.cat([prompt(9), prompt(9)]), cache=cache)
        cache.reset()
        ids = prompt(12, seed=5)
        out = model.generate(ids, cache=cache, max_new_tokens=6, do_sample=False)
        assert out[0, 12:].tolist() == expected(model, ids, 6)


def test_after_close_the_model_is_followed_no_more() -> None:
    model = tiny_model("qwen3")
    cache = PagedCache.for_generate(model, MEMORY)
    cache.close()
    cache.close()
    with pytest.raises(UsageError, match="no forward is bound"):
        model(prompt(5), cache=cache)
    assert len(expected(model, prompt(5), 2)) == 2


def test_a_failed_forward_leaves_the_batch_where_it_was() -> None:
    model, ids = tiny_model("qwen3_next"), prompt(20)
    with PagedCache.for_generate(model, MEMORY) as cache, torch.no_grad():
        model(ids, cache=cache)

        def fail(*_: object) -> None:
            raise RuntimeError("on purpose")

        hook = model.lm_head.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            model(ids[:, :1], cache=cache)
        hook.remove()
        assert cache.get_seq_length() == 20
        more = prompt(6, seed=4)
        logits = model(more, cache=cache).logits[0, -1]
        want = model(torch.cat([ids, more], 1), use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-4)


@torch.no_grad()
def test_too_long_or_too_many() -> None:
    model = tiny_model("gemma3_text")
    with manager() as kv, PagedCache.for_generate(model, kv) as cache:
        with pytest.raises(CapacityError, match="prompt has 97 tokens, max_tokens is 96"):
            model(prompt(97), cache=cache)
        with pytest.raises(CapacityError, match="batch of 5 rows"):
            model(torch.cat([prompt(8)] * 5), cache=cache)
        assert not kv.snapshot().sequences
        assert model(prompt(8), cache=cache).logits.shape[1] == 8
