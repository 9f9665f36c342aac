"""A real model while memory is moved under it by force: does every token stay the same?

    python benchmarks/forced_moves/run.py [--steps 2000] [--every 3] [--model PATH_OR_NAME]

The reference engine serves requests, a few at a time. Every few steps one move is forced and
carried out at once: from each pool to each other as much as it can do without, so that live pages
have to move together; from the pools to the system and back. Exit status 1 if a token differs from
what transformers' own cache gives, as the demo judges it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import pydoc_data.topics
import sys
from dataclasses import asdict, dataclass
from itertools import cycle, permutations
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch
import transformers

import kvtide
from kvtide.cli.demo.oracle import Oracle
from kvtide.cli.demo.traffic import SYSTEM, Job
from kvtide.engine import LLM, Loaded, RequestId, SamplingParams, load_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RUNNING = 4
ANSWER = 200
LENGTHS = (280, 420, 560, 700)
"""Prompt tokens; with the answers they lie on both sides of the window of 512."""

MEMORY = 192 << 20
GRANULE = 128 << 10
SPARE_PAGES = 6
"""Pages beyond the used ones that a pool keeps when it is squeezed."""


@dataclass(slots=True)
class Tally:
    """What was done."""

    steps: int = 0
    forced_moves: int = 0
    granules_forced: int = 0
    granules_moved: int = 0
    pages_relocated: int = 0
    requests: int = 0
    tokens_compared: int = 0
    different_tokens: int = 0
    smallest_logit_gap: float = 0.0
    engine_seconds: float = 0.0
    transformers_seconds: float = 0.0


def make_jobs(loaded: Loaded) -> Iterator[Job]:
    """Ever more requests over one system prompt, each about another text."""
    assert loaded.tokenizer is not None
    system = loaded.tokenizer(SYSTEM)["input_ids"][:160]
    topics: dict[str, str] = pydoc_data.topics.topics
    words = {name: loaded.tokenizer(topics[name])["input_ids"][1:] for name in sorted(topics)}
    texts = [ids for ids in words.values() if len(ids) >= 2 * max(LENGTHS)]
    for number, length in enumerate(cycle(LENGTHS)):
        start = 97 * (number // len(texts))
        excerpt = texts[number % len(texts)][start : start + length - len(system)]
        yield Job(prompt=(*system, *excerpt), shared=len(system), arrival=0)


def moves(llm: LLM) -> Iterator[Callable[[], int]]:
    """Moves in all directions, again and again; each returns the granules that went."""
    kv = llm.kv

    def squeeze(donor: str, receiver: str, part: int) -> int:
        facts = kv.snapshot().pools[donor]
        kept = -(-(facts.used + SPARE_PAGES) * facts.page_bytes // GRANULE)
        count = max(1, (facts.granules - kept) // part)
        move = kvtide.Move(donor=donor, receiver=receiver, granules=count, reason="forced")
        return kv.rebalance((move,)).moved + kv.settle().moved

    def budget(num_bytes: int) -> int:
        return kv.set_budget(num_bytes).moved + kv.settle().moved

    for part in cycle((1, 3)):
        for donor, receiver in permutations(kv.pools, 2):
            yield lambda d=donor, r=receiver, n=part: squeeze(d, r, n)
        yield lambda: budget(MEMORY * 3 // 4)
        yield lambda: budget(MEMORY)


def serve(
    loaded: Loaded, tally: Tally, steps: int, every: int
) -> tuple[list[Job], list[list[int]]]:
    """Run for at least so many steps, then until all is answered; jobs and their answers."""
    ids: list[RequestId] = []
    jobs: list[Job] = []
    supply, params = make_jobs(loaded), SamplingParams(max_tokens=ANSWER)
    max_tokens = max(LENGTHS) + ANSWER
    sizes = {"memory_bytes": MEMORY, "granule_bytes": GRANULE, "max_sequences": RUNNING}
    with LLM(loaded, max_tokens=max_tokens, block_tokens=16, **sizes) as llm:
        forced, open_now = moves(llm), 0
        while tally.steps < steps or llm.has_work:
            while open_now < RUNNING and tally.steps < steps:
                jobs.append(next(supply))
                ids.append(llm.add(jobs[-1].prompt, params))
                open_now += 1
            open_now -= sum(delta.finish is not None for delta in llm.step())
            tally.steps += 1
            if tally.steps % every == 0:
                tally.granules_forced += next(forced)()
                tally.forced_moves += 1
                llm.kv.check()
            if tally.steps % 200 == 0:
                granules, pages = llm.kv.moved
                print(
                    f"{tally.steps} steps, {len(ids)} requests, {granules} granules moved, "
                    f"{pages} pages relocated",
                    file=sys.stderr,
                )
        end = llm.kv.snapshot()
        tally.granules_moved, tally.pages_relocated = end.granules_moved, end.pages_relocated
        outputs = [llm.take(i) for i in ids]
    return jobs, [list(output.token_ids) for output in outputs if output is not None]


def compare(loaded: Loaded, tally: Tally, jobs: list[Job], answers: list[list[int]]) -> None:
    """Count tokens that transformers' own cache gives otherwise."""
    right = Oracle(loaded.model, ANSWER).answer(jobs, lambda count: None)
    tally.requests = len(jobs)
    tally.smallest_logit_gap = right.smallest_gap
    for number, (got, want) in enumerate(zip(answers, right.answers, strict=True)):
        same = sum(a == b for a, b in zip(got, want, strict=False))
        tally.tokens_compared += max(len(got), len(want))
        tally.different_tokens += (wrong := max(len(got), len(want)) - same)
        if wrong:
            first = next(i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b)
            print(f"request {number}: {wrong} tokens differ from token {first} on", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=3, help="steps from one move to the next")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "result.json")
    args = parser.parse_args()
    loaded = load_model(args.model, say=lambda line: print(line, file=sys.stderr))
    tally = Tally()
    began = perf_counter()
    jobs, answers = serve(loaded, tally, args.steps, args.every)
    tally.engine_seconds = round(perf_counter() - began, 1)
    began = perf_counter()
    compare(loaded, tally, jobs, answers)
    tally.transformers_seconds = round(perf_counter() - began, 1)
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        "model": loaded.name,
        "running": RUNNING,
        "every_steps": args.every,
        "memory_bytes": MEMORY,
        "granule_bytes": GRANULE,
        **asdict(tally),
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 1 if tally.different_tokens else 0


if __name__ == "__main__":
    sys.exit(main())
