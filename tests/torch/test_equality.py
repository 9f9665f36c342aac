"""Generation through pages equals transformers' own cache, token for token."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import pytest
import torch
from tests.torch.tiny import (
    ATTENTION_ONLY,
    FAMILIES,
    KINDS,
    PADDED_DTYPES,
    expected,
    prompt,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.torch.driver import Driver
    from transformers import PreTrainedModel

    from kvtide import Sequence
    from kvtide.types import TokenArray

    Drive: TypeAlias = Callable[..., Driver]

LENGTHS = (40, 23, 9, 31)

every_family = pytest.mark.parametrize("family", FAMILIES)


def every_family_with(name: str, first: int, *others: int) -> pytest.MarkDecorator:
    """Every family with the first value, one of every kind of cache with the others too."""
    cases = [(family, first) for family in FAMILIES]
    cases += [(family, value) for family in KINDS for value in others]
    return pytest.mark.parametrize(("family", name), cases)


# Everything runs in float64, where the order of a sum cannot flip a token; but the recurrent layers
# compute in float32 whatever they are given, so logits may differ by their rounding.
LOGIT_BOUND = 1e-4


@torch.no_grad()
def assert_same_logits(model: PreTrainedModel, tokens: TokenArray, logits: torch.Tensor) -> None:
    """`logits` are those of the model without a cache over all computed tokens."""
    ids = torch.from_numpy(tokens.astype("int64"))[None]
    want = model(ids, use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits, want, rtol=0, atol=LOGIT_BOUND)


def answer(seq: Sequence, prompt_length: int) -> list[int]:
    return seq.tokens[prompt_length:].tolist()


def tokens_of(seq: Sequence) -> torch.Tensor:
    return torch.from_numpy(seq.tokens.astype("int64"))[None]


@every_family_with("block_tokens", 4, 16, 3)
def test_one_sequence(family: str, block_tokens: int, drive: Drive) -> None:
    driver = drive(family, block_tokens=block_tokens)
    ids = prompt(40)
    seq = driver.start(ids)
    driver.decode([seq], 23)
    assert answer(seq, 40) == expected(driver.model, ids, 24)
    assert_same_logits(driver.model, seq.tokens[:-1], driver.logits[id(seq)])


@every_family
def test_in_bfloat16(family: str, drive: Drive) -> None:
    # Not a block of prompt, so that no chunk ends where transformers' own run has none: there a
    # state is rounded.
    driver = drive(family, block_tokens=8, dtype=torch.bfloat16)
    ids = prompt(7)
    seq = driver.start(ids)
    driver.decode([seq], 39)
    assert answer(seq, 7) == expected(driver.model, ids, 40)


@every_family_with("chunk", 7, 1, 16)
def test_prompt_in_chunks(family: str, chunk: int, drive: Drive) -> None:
    driver = drive(family)
    ids = prompt(45)
    seq = driver.start(ids, chunk=chunk)
    driver.decode([seq], 11)
    assert answer(seq, 45) == expected(driver.model, ids, 12)


@every_family
def test_ragged_batch(family: str, drive: Drive) -> None:
    driver = drive(family)
    prompts = [prompt(n, seed=n) for n in LENGTHS]
    seqs = [driver.start(ids, chunk=13) for ids in prompts]
    driver.decode(seqs, 23)
    for ids, seq, length in zip(prompts, seqs, LENGTHS, strict=True):
        assert answer(seq, length) == expected(driver.model, ids, 24)
        assert_same_logits(driver.model, seq.tokens[:-1], driver.logits[id(seq)])


@pytest.mark.parametrize("family", ATTENTION_ONLY)
def test_several_prompts_in_one_forward(family: str, drive: Drive) -> None:
    driver = drive(family, dtype=PADDED_DTYPES.get(family, torch.float64))
    prompts = [prompt(n, seed=n) for n in LENGTHS]
    seqs = [driver.kv.open(ids[0].numpy()) for ids in prompts]
    assert driver.kv.admit(seqs)
    driver.run(seqs, [11, 23, 9, 2])  # two whole prompts, two parts
    driver.run([seqs[0], seqs[3]], [29, 29])
    driver.decode(seqs, 11)
    for ids, seq, length in zip(prompts, seqs, LENGTHS, strict=True):
        assert answer(seq, length) == expected(driver.model, ids, 12)


@every_family
def test_equal_rows_in_one_forward(family: str, drive: Drive) -> None:
    driver = drive(family)
    prompts = [prompt(21, seed=n) for n in range(3)]
    seqs = [driver.kv.open(ids[0].numpy()) for ids in prompts]
    assert driver.kv.admit(seqs)
    driver.run(seqs, driver.kv.chunk(seqs[0], 13))
    for seq in seqs:
        driver.prefill(seq)
    before = driver.num_forwards
    driver.decode(seqs, 11)
    assert driver.num_forwards - before == 11
    for ids, seq in zip(prompts, seqs, strict=True):
        assert answer(seq, 21) == expected(driver.model, ids, 12)


@every_family
def test_sequences_come_and_go(family: str, drive: Drive) -> None:
    driver = drive(family)
    prompts = [prompt(n, seed=n) for n in LENGTHS]
    first, second = (driver.start(ids) for ids in prompts[:2])
    driver.decode([first, second], 5)
    third = driver.start(prompts[2])
    driver.decode([third, first], 6)
    driver.kv.close([first])
    fourth = driver.start(prompts[3])
    driver.decode([fourth, second, third], 6)
    for ids, seq, count in (
        (prompts[1], second, 12),
        (prompts[2], third, 13),
        (prompts[3], fourth, 7),
    ):
        assert answer(seq, ids.shape[1]) == expected(driver.model, ids, count)


@every_family
def test_prefix_reuse(family: str, drive: Drive) -> None:
    driver = drive(family)
    shared, tails = prompt(32, seed=1), [prompt(9, seed=2), prompt(14, seed=3)]
    first = driver.start(torch.cat([shared, tails[0]], 1))
    driver.decode([first], 6)
    ids = torch.cat([shared, tails[1]], 1)
    second = driver.start(ids)
    assert second.hit >= 28
    driver.decode([first, second], 9)
    assert answer(second, 46) == expected(driver.model, ids, 10)
    driver.kv.close([first, second])
    third = driver.start(ids)  # the same prompt again: matched up to its end
    driver.decode([third], 9)
    assert third.hit >= 40
    assert answer(third, 46) == expected(driver.model, ids, 10)


@every_family
def test_continued_conversation(family: str, drive: Drive) -> None:
    driver = drive(family)
    seq = driver.start(prompt(27))
    driver.decode([seq], 12)
    turn = tokens_of(seq)
    driver.kv.close([seq])
    ids = torch.cat([turn, prompt(8, seed=9)], 1)
    second = driver.start(ids)
    driver.decode([second], 7)
    assert second.hit >= 32
    assert answer(second, ids.shape[1]) == expected(driver.model, ids, 8)


@every_family
def test_fork(family: str, drive: Drive) -> None:
    driver = drive(family)
    ids = prompt(30)
    parent = driver.start(ids)
    driver.decode([parent], 5)
    child = driver.kv.fork(parent)
    assert child is not None
    other = int(parent.tokens[-1] % 200 + 7)
    driver.choose(child, other)
    branch = tokens_of(child)
    driver.decode([parent, child], 6)
    assert answer(parent, 30) == expected(driver.model, ids, 12)
    assert answer(child, 36) == expected(driver.model, branch, 6)


@every_family
def test_suspend_and_resume(family: str, drive: Drive) -> None:
    driver = drive(family)
    prompts = [prompt(n, seed=n) for n in LENGTHS[:2]]
    seqs = [driver.start(ids) for ids in prompts]
    driver.decode(seqs, 6)
    driver.kv.suspend([seqs[0]])
    driver.decode([seqs[1]], 5)
    assert driver.kv.resume([seqs[0]])
    driver.prefill(seqs[0])  # what was not cached is computed again, and the newest token
    driver.decode(seqs, 7)
    assert answer(seqs[0], 40) == expected(driver.model, prompts[0], 15)
    assert answer(seqs[1], 23) == expected(driver.model, prompts[1], 19)


@every_family
def test_resume_after_everything_was_dropped(family: str, drive: Drive) -> None:
    driver = drive(family)
    ids = prompt(26)
    seq = driver.start(ids)
    driver.decode([seq], 6)
    driver.kv.suspend([seq])
    driver.kv.reset()
    assert driver.kv.resume([seq])
    assert seq.computed == 0
    driver.prefill(seq, chunk=9)
    driver.decode([seq], 8)
    assert answer(seq, 26) == expected(driver.model, ids, 16)


@every_family
def test_pages_move_in_mid_generation(family: str, drive: Drive) -> None:
    driver = drive(family, block_tokens=3, tight=8, spare_pool=True)
    prompts = [prompt(n, seed=n) for n in LENGTHS]
    seqs = [driver.start(ids, chunk=13) for ids in prompts]
    relocated = 0
    for round_ in range(4):
        fillers = [driver.start(prompt(5, seed=100 + 2 * round_ + i)) for i in range(2)]
        driver.decode([*fillers, *seqs], 6)
        driver.kv.close(fillers)  # leaves holes between the others' pages
        driver.kv.reset()
        relocated += driver.squeeze()
    assert relocated > 0
    for ids, seq, length in zip(prompts, seqs, LENGTHS, strict=True):
        assert answer(seq, length) == expected(driver.model, ids, 25)


@every_family
def test_prefixes_come_and_go_under_eviction(family: str, drive: Drive) -> None:
    driver = drive(family, tight=2)
    hits = 0
    for turn in range(12):
        ids = torch.cat([prompt(24, seed=turn // 3), prompt(12 + turn, seed=50 + turn)], 1)
        seq = driver.start(ids, chunk=11)
        driver.decode([seq], 4)
        hits += seq.hit
        assert answer(seq, ids.shape[1]) == expected(driver.model, ids, 5)
        driver.kv.close([seq])
    facts = driver.kv.snapshot()
    assert any(pool.evicted for pool in facts.pools.values())
    assert hits
