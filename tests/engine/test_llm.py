"""The whole engine on tiny models: the same tokens as transformers, whatever else is going on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtide.engine import LLM, FinishReason, Loaded, SamplingParams, StepStats
from kvtide.errors import ConfigError, UsageError

from ..torch.tiny import prompt, tiny_model
from .small import SMALL, make_prompts, right

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtide.engine.llm import Settings


class Letters:
    """A tokenizer of one letter a token."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(token + 0x100) for token in token_ids)

    def save_pretrained(self, save_directory: object) -> None:
        raise NotImplementedError


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(tiny_model("gemma3_text"), Letters(), **SMALL) as engine:
        yield engine


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
def test_answers_are_right_when_requests_are_preempted(family: str) -> None:
    model = tiny_model(family)
    prompts = [prompt(40, seed=n)[0].tolist() for n in range(4)]
    for memory_kib in range(400, 60, -40):
        settings: Settings = {**SMALL, "memory_bytes": memory_kib << 10}
        try:
            engine = LLM(model, **settings)
        except ConfigError:
            break
        with engine:
            outputs = engine.generate(prompts, SamplingParams(max_tokens=60))
            engine.kv.check()
        if any(output.num_preempted for output in outputs):
            assert [list(output.token_ids) for output in outputs] == right(model, prompts, 60)
            return
    pytest.fail("no memory size made the engine preempt a request")


def test_streams_add_up_to_the_answers(llm: LLM) -> None:
    prompts = make_prompts()[:4]
    params = SamplingParams(max_tokens=9)
    outputs = llm.generate(prompts, params)
    texts, tokens = [""] * 4, [()] * 4
    finish: list[FinishReason | None] = [None] * 4
    for index, delta in llm.stream(prompts, params):
        assert finish[index] is None
        texts[index] += delta.text
        tokens[index] += delta.token_ids
        finish[index] = delta.finish
    assert texts == [output.text for output in outputs]
    assert tokens == [output.token_ids for output in outputs]
    assert finish == [FinishReason.LENGTH] * 4


def test_a_stream_left_early_leaves_nothing_behind(llm: LLM) -> None:
    for _ in llm.stream(make_prompts(), SamplingParams(max_tokens=30)):
        break
    assert not llm.has_work
    assert llm.kv.snapshot().sequences == 0


def test_stop_strings_end_the_text_before_them(llm: LLM) -> None:
    whole = llm.generate(["hello"], SamplingParams(max_tokens=12))[0]
    stop = whole.text[4:6]
    output = llm.generate(["hello"], SamplingParams(max_tokens=12, stop=(stop,)))[0]
    assert output.finish is FinishReason.STOP
    assert output.text == whole.text[: whole.text.index(stop)]
    assert len(output.token_ids) < len(whole.token_ids)


def test_a_stop_token_ends_the_answer_without_text(llm: LLM) -> None:
    whole = llm.generate(["hello"], SamplingParams(max_tokens=12))[0]
    stop = whole.token_ids[3]
    first = whole.token_ids.index(stop)
    output = llm.generate(["hello"], SamplingParams(max_tokens=12, stop_token_ids=(stop,)))[0]
    assert output.finish is FinishReason.STOP
    assert output.token_ids == whole.token_ids[: first + 1]
    assert output.text == whole.text[:first]


def test_a_seed_fixes_the_answer_whatever_runs_beside_it(llm: LLM) -> None:
    params = SamplingParams(max_tokens=15, temperature=1.0, top_p=0.9, seed=3)
    alone = llm.generate([[5, 6, 7]], params)[0]
    llm.kv.reset()
    others = [SamplingParams(max_tokens=15, temperature=2.0)] * 3
    beside = llm.generate([[9, 9], [5, 6, 7], [8], [5, 6]], [others[0], params, *others[1:]])[1]
    assert beside.token_ids == alone.token_ids
    greedy = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=15))[0]
    assert greedy.token_ids != alone.token_ids


def test_requests_can_be_added_and_aborted_between_steps(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20)
    first, second = llm.add([5, 6, 7], params), llm.add([8, 9], params)
    llm.step()
    assert llm.abort(second)
    third = llm.add([3], params)
    while llm.has_work:
        llm.step()
    outputs = [llm.take(request) for request in (first, second, third)]
    assert [output and output.finish for output in outputs] == [
        FinishReason.LENGTH,
        FinishReason.ABORT,
        FinishReason.LENGTH,
    ]
    assert not llm.abort(first)
    assert llm.take(first) is None


def test_a_request_that_can_never_fit_says_why_and_the_others_go_on(llm: LLM) -> None:
    bad, good = llm.generate([list(range(3, 203)), [5, 6]], SamplingParams(max_tokens=4))
    assert bad.finish is FinishReason.ERROR
    assert "200 tokens" in (bad.error or "")
    assert (good.finish, len(good.token_ids)) == (FinishReason.LENGTH, 4)


def test_facts_of_every_step_are_reported() -> None:
    steps: list[StepStats] = []
    settings: Settings = {**SMALL, "max_sequences": 2, "on_step": steps.append}
    with LLM(tiny_model("gemma3_text"), **settings) as engine:
        engine.generate([[3] * 10, [4] * 10, [5] * 10], SamplingParams(max_tokens=4))
    assert [step.step for step in steps] == list(range(len(steps)))
    assert sum(step.prompt_tokens for step in steps) == 30
    assert sum(step.decode_tokens for step in steps) == 9
    assert sum(step.num_admitted for step in steps) == 3
    assert max(step.waiting for step in steps) == 1
    assert all(0.0 < step.pause_ms <= step.step_ms for step in steps)


def test_text_needs_a_tokenizer() -> None:
    with LLM(tiny_model("gemma3_text"), **SMALL) as engine:
        with pytest.raises(UsageError, match="tokenizer"):
            engine.add("hello")
        with pytest.raises(UsageError, match="stop strings"):
            engine.add([5], SamplingParams(stop=("x",)))
        assert engine.generate([[5]], SamplingParams(max_tokens=2))[0].text == ""


def test_numbers_of_prompts_and_parameters_must_match(llm: LLM) -> None:
    with pytest.raises(UsageError, match="2 prompts and 1 sampling parameters"):
        llm.generate([[3], [4]], [SamplingParams()])


def test_a_loaded_model_brings_its_tokenizer() -> None:
    loaded = Loaded(model=tiny_model("gemma3_text"), tokenizer=Letters(), name="tiny")
    with LLM(loaded, **SMALL) as engine:
        assert engine.generate(["hi"], SamplingParams(max_tokens=3))[0].text
