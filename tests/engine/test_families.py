"""Every class of model through the whole engine: the tokens of transformers' own cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtide.engine import LLM, SamplingParams
from kvtide.torch import layout_from_model

from ..torch.memory import least_bytes
from ..torch.tiny import EQUAL_ROWS, FAMILIES, FOLD, WRAPPERS, prompt, tiny_model
from .small import SMALL, make_prompts, right

if TYPE_CHECKING:
    from kvtide.engine.llm import Settings


@pytest.mark.parametrize("family", FAMILIES + WRAPPERS)
def test_answers_are_those_of_transformers(family: str) -> None:
    model = tiny_model(family)
    prompts = make_prompts()
    block_tokens = FOLD.get(family, 4)
    layout = layout_from_model(model, block_tokens=block_tokens, max_tokens=SMALL["max_tokens"])
    settings: Settings = {  # little more than the longest sequence needs
        **SMALL,
        "block_tokens": block_tokens,
        "state_interval": 2 * block_tokens,  # prompts are short, and their states count here
        "memory_bytes": int(1.4 * least_bytes(layout, SMALL["max_tokens"])),
    }
    with LLM(model, **settings) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=12))
        again = engine.generate(prompts, SamplingParams(max_tokens=12))
        engine.kv.check()
        facts = engine.kv.snapshot()
    answers = right(model, prompts, 12)
    assert [list(output.token_ids) for output in outputs] == answers
    assert [list(output.token_ids) for output in again] == answers
    assert sum(output.hit_tokens for output in [*outputs, *again]) > 0
    assert sum(pool.evicted for pool in facts.pools.values()) > 0


@pytest.mark.parametrize("family", ["gemma3_text", "gemma3n_text", "gpt_oss", "deepseek_v4"])
def test_windows_that_no_sequence_outgrows(family: str) -> None:
    model = tiny_model(family)
    prompts = [prompt(n, seed=n)[0].tolist() for n in (1, 5, 7)]
    settings: Settings = {**SMALL, "max_tokens": 16, "block_tokens": 8}
    with LLM(model, **settings) as engine:
        assert not any(g.name.startswith("window") for g in engine.kv.layout.groups)
        outputs = engine.generate(prompts, SamplingParams(max_tokens=8))
    assert [list(output.token_ids) for output in outputs] == right(model, prompts, 8)


@pytest.mark.parametrize("family", EQUAL_ROWS)
def test_rows_of_equal_length_share_a_forward(family: str) -> None:
    model, calls = tiny_model(family), []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    settings: Settings = {**SMALL, "block_tokens": 8, "chunk_tokens": 64}
    with LLM(model, **settings) as engine:
        engine.generate([[n] * 9 for n in (5, 6, 7)], SamplingParams(max_tokens=6))
    hook.remove()
    assert len(calls) == 6
