"""Serve the traffic once with kvtide and keep what happened at every step."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from kvtide.cli.demo.picture import PoolSample
from kvtide.cli.demo.traffic import num_distinct
from kvtide.engine import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtide.cli.demo.traffic import Job, Phase
    from kvtide.engine import Loaded, RequestId, RequestOutput, StepStats
    from kvtide.engine.llm import Settings
    from kvtide.engine.parallel import Place
    from kvtide.facts import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One way of serving all jobs: answers in the order of the jobs, facts per step, pools."""

    outputs: tuple[RequestOutput, ...]
    steps: tuple[StepStats, ...]
    samples: tuple[PoolSample, ...]
    phase_starts: tuple[int, ...]
    end: Snapshot
    stranded_bytes: tuple[int, ...]
    seconds: float

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were found in the cache at first admission."""
        return sum(output.hit_tokens for output in self.outputs)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed although the same prefix had been computed before."""
        computed = sum(step.prompt_tokens + step.decode_tokens for step in self.steps)
        # The last token of an answer is known and never computed.
        texts = [(*out.prompt_token_ids, *out.token_ids[:-1]) for out in self.outputs]
        return computed - num_distinct(texts)


class _Recorder:
    """Runs an engine and takes notes after each step."""

    def __init__(self, llm: LLM, answer_tokens: int) -> None:
        self.llm = llm
        self.params = SamplingParams(max_tokens=answer_tokens)
        self.samples: list[PoolSample] = []
        self.stranded: list[int] = []

    def step(self) -> int:
        """One engine step; the number of requests that ended in it."""
        ended = sum(delta.finish is not None for delta in self.llm.step())
        facts = self.llm.kv.snapshot()
        step = len(self.stranded)
        self.stranded.append(sum(pool.stranded_bytes for pool in facts.pools.values()))
        self.samples += [
            PoolSample(
                step=step,
                pool=pool.name,
                mapped_bytes=pool.mapped_bytes,
                used_bytes=pool.used * pool.page_bytes,
                cached_bytes=pool.cached * pool.page_bytes,
            )
            for pool in facts.pools.values()
        ]
        return ended

    def run(self, jobs: Sequence[Job], progress: Callable[[int], None]) -> list[RequestId]:
        """Serve the jobs of one phase, each from the step of its arrival on."""
        ids: list[RequestId] = []
        start = len(self.stranded)
        while len(ids) < len(jobs) or self.llm.has_work:
            due = start + jobs[len(ids)].arrival if len(ids) < len(jobs) else None
            # With nothing to do, time jumps to the next arrival.
            if due is not None and (due <= len(self.stranded) or not self.llm.has_work):
                start = min(start, len(self.stranded) - jobs[len(ids)].arrival)
                ids.append(self.llm.add(jobs[len(ids)].prompt, self.params))
                continue
            progress(self.step())
        return ids


def run_trial(
    model: Loaded,
    phases: Sequence[Phase],
    *,
    answer_tokens: int,
    settings: Settings,
    progress: Callable[[int], None],
    ranks: Place | None = None,
) -> Trial:
    """Serve all phases in turn; `progress` is told how many requests ended, step by step.

    `ranks`: this process's place among those that serve together. Outputs are those of requests
    that are served here.
    """
    steps: list[StepStats] = []
    started = perf_counter()
    with LLM(model, ranks=ranks, **{**settings, "on_step": steps.append}) as llm:
        recorder = _Recorder(llm, answer_tokens)
        ids: list[RequestId] = []
        starts: list[int] = []
        for phase in phases:
            starts.append(len(recorder.stranded))
            ids += recorder.run(phase.jobs, progress)
        outputs = [output for i in ids if (output := llm.take(i)) is not None]
        return Trial(
            outputs=tuple(outputs),
            steps=tuple(steps),
            samples=tuple(recorder.samples),
            phase_starts=tuple(starts),
            end=llm.kv.snapshot(),
            stranded_bytes=tuple(recorder.stranded),
            seconds=perf_counter() - started,
        )
