"""The same requests through transformers' own `generate` and `DynamicCache`: what is right.

Prefixes that jobs share are computed once and copied. Jobs with equal prompt lengths and an equal
prefix go through `generate` as one batch, without padding, so that each row sees exactly its own
tokens, as it would alone. Nothing of kvtide takes part.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from kvtide.cli.demo.traffic import Job

MAX_BATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The right answers, in the order of the jobs.

    `smallest_gap` is the smallest difference between the best and the second best logit anywhere:
    rounding of another batch shape or another machine, about 1e-5, can not turn a token over
    unless it is as small.
    """

    answers: tuple[tuple[int, ...], ...]
    smallest_gap: float


class Oracle:
    """Greedy answers of `model` by transformers alone."""

    def __init__(self, model: PreTrainedModel, answer_tokens: int) -> None:
        self._model: Any = model
        self._answer_tokens = answer_tokens
        eos: Any = self._model.generation_config.eos_token_id
        self._eos_ids = {eos} if isinstance(eos, int) else set(eos or ())

    def answer(self, jobs: Sequence[Job], progress: Callable[[int], None]) -> Reference:
        """Answer all jobs; `progress` is told how many, batch by batch."""
        answers: dict[int, tuple[int, ...]] = {}
        gap = float("inf")
        order = sorted(range(len(jobs)), key=lambda i: (_prefix(jobs[i]), len(jobs[i].prompt), i))
        for prefix, same_prefix in groupby(order, key=lambda i: _prefix(jobs[i])):
            past = self._prefill(prefix)
            for _, group in groupby(same_prefix, key=lambda i: len(jobs[i].prompt)):
                members = list(group)
                for at in range(0, len(members), MAX_BATCH):
                    batch = members[at : at + MAX_BATCH]
                    rows, least = self._generate([jobs[i].prompt for i in batch], past)
                    answers.update(zip(batch, rows, strict=True))
                    gap = min(gap, least)
                    progress(len(batch))
        return Reference(answers=tuple(answers[i] for i in range(len(jobs))), smallest_gap=gap)

    @torch.inference_mode()
    def _prefill(self, prefix: tuple[int, ...]) -> DynamicCache:
        cache = DynamicCache(config=self._model.config)
        self._model.base_model(torch.tensor([prefix]), cache=cache, use_cache=True)
        return cache

    @torch.inference_mode()
    def _generate(
        self, prompts: Sequence[tuple[int, ...]], past: DynamicCache
    ) -> tuple[list[tuple[int, ...]], float]:
        """Answers of prompts of one length that begin with the prefix in `past`."""
        cache = copy.deepcopy(past)
        cache.batch_repeat_interleave(len(prompts))
        ids = torch.tensor(prompts)
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            cache=cache,
            do_sample=False,
            max_new_tokens=self._answer_tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
        answers = [self._until_end(row[ids.shape[1] :].tolist()) for row in out.sequences]
        return answers, _smallest_gap(out.logits, answers)

    def _until_end(self, tokens: list[int]) -> tuple[int, ...]:
        """A row without the padding that follows its end-of-turn token."""
        ends = (i for i, token in enumerate(tokens) if token in self._eos_ids)
        return tuple(tokens[: next(ends, len(tokens)) + 1])


def _prefix(job: Job) -> tuple[int, ...]:
    return job.prompt[: job.shared]


def _smallest_gap(logits: Sequence[torch.Tensor], answers: Sequence[Sequence[int]]) -> float:
    """Smallest gap between the two best logits, over the tokens that belong to an answer."""
    gap = float("inf")
    for step, rows in enumerate(logits):
        best = rows.topk(2, dim=-1).values
        gaps: list[float] = (best[:, 0] - best[:, 1]).numpy().tolist()
        gap = min(
            [gap, *(g for g, answer in zip(gaps, answers, strict=True) if step < len(answer))]
        )
    return gap
