"""Tokens per second: kvtide's engine and transformers, on the same model, batch and prompts.

    python benchmarks/engine/run.py [--model PATH_OR_NAME] [--rounds 5] [--out FILE]

Three ways to answer the same prompts greedily, one after the other in each round, so that whatever
else the machine does falls on all of them: `LLM.generate`, `model.generate` with DynamicCache, and
`model.generate_batch` (transformers' continuous batching). No prefix is reused between rounds. A
round with a single new token gives the time of the prompts, so that decoding can be told apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import pydoc_data.topics
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

import kvtide
from kvtide.engine import LLM, Loaded, SamplingParams, load_model

if TYPE_CHECKING:
    from kvtide.engine.load import Tokenizer

Answers = list[list[int]]
Way = Callable[[list[list[int]], int], Answers]


def make_prompts(tokenizer: Tokenizer, *, batch: int, length: int) -> list[list[int]]:
    """`batch` different prompts of `length` tokens from the Python documentation."""
    texts = sorted(pydoc_data.topics.topics.values(), key=len, reverse=True)[:batch]
    return [tokenizer(text)["input_ids"][:length] for text in texts]


def ways(loaded: Loaded, llm: LLM) -> dict[str, Way]:
    """The contestants by name; each takes prompts and the number of new tokens."""
    model: Any = loaded.model

    def config(num_new: int) -> GenerationConfig:
        return GenerationConfig(
            max_new_tokens=num_new, do_sample=False, eos_token_id=None, pad_token_id=0
        )

    def engine(prompts: list[list[int]], num_new: int) -> Answers:
        llm.kv.reset()
        params = SamplingParams(max_tokens=num_new, ignore_eos=True)
        return [list(output.token_ids) for output in llm.generate(prompts, params)]

    def generate(prompts: list[list[int]], num_new: int) -> Answers:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, generation_config=config(num_new))
        return out[:, ids.shape[1] :].tolist()

    def generate_batch(prompts: list[list[int]], num_new: int) -> Answers:
        # Its manager is kept from call to call: starting one takes seconds.
        out = model.generate_batch(
            inputs=prompts,
            generation_config=config(num_new),
            continuous_batching_config=ContinuousBatchingConfig(allow_block_sharing=False),
            persistent_manager=True,
        )
        return [answer.generated_tokens for answer in out.values()]

    return {"kvtide": engine, "generate": generate, "generate_batch": generate_batch}


def timed(way: Way, prompts: list[list[int]], num_new: int) -> tuple[float, Answers]:
    started = perf_counter()
    answers = way(prompts, num_new)
    return perf_counter() - started, answers


def measure(
    contestants: dict[str, Way], prompts: list[list[int]], args: argparse.Namespace
) -> dict[str, Any]:
    """Seconds of every round, load of the machine before it, and whether the answers agree."""
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"prompts": [], "all": []} for name in contestants
    }
    answers: dict[str, Answers] = {}
    load: list[float] = []
    for number in range(args.rounds + 1):
        load.append(os.getloadavg()[0])
        for name, way in contestants.items():
            total, answers[name] = timed(way, prompts, args.new_tokens)
            first, _ = timed(way, prompts, 1)
            if number:  # the first round warms up
                seconds[name]["prompts"].append(first)
                seconds[name]["all"].append(total)
            print(f"round {number} {name}: {first:.2f} s + {total - first:.2f} s", file=sys.stderr)
    same = {name: rows == answers["kvtide"] for name, rows in answers.items()}
    return {"seconds": seconds, "load_before_round": load, "same_tokens_as_kvtide": same}


def rates(
    seconds: dict[str, dict[str, list[float]]], args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Median tokens per second: prompts, decoding, and new tokens over the whole time."""
    found: dict[str, dict[str, float]] = {}
    for name, lists in seconds.items():
        pairs = list(zip(lists["prompts"], lists["all"], strict=True))
        decoded = args.batch * (args.new_tokens - 1)
        found[name] = {
            "prompt_tokens_per_s": args.batch
            * args.prompt_tokens
            / statistics.median(lists["prompts"]),
            "decode_tokens_per_s": statistics.median(decoded / (b - a) for a, b in pairs),
            "new_tokens_per_s": args.batch * args.new_tokens / statistics.median(lists["all"]),
        }
    return found


def ratios(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """How many times as fast kvtide is."""
    return {
        name: {key: found["kvtide"][key] / value for key, value in rate.items()}
        for name, rate in found.items()
        if name != "kvtide"
    }


def machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "transformers": transformers.__version__,
        "kvtide": kvtide.__version__,
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "result.json")
    args = parser.parse_args()
    here = machine()
    loaded = load_model(args.model, say=lambda line: print(line, file=sys.stderr))
    prompts = make_prompts(loaded.tokenizer, batch=args.batch, length=args.prompt_tokens)
    sizes = {"max_sequences": args.batch, "chunk_tokens": args.batch * args.prompt_tokens}
    with LLM(loaded, max_tokens=args.prompt_tokens + args.new_tokens, **sizes) as llm:
        found = measure(ways(loaded, llm), prompts, args)
    rate = rates(found["seconds"], args)
    settings = {key: str(value) if key == "out" else value for key, value in vars(args).items()}
    settings.pop("out")
    result = {
        "machine": here,
        "settings": settings,
        "rates": rate,
        "kvtide_is_times_as_fast_as": ratios(rate),
        **found,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({"rates": rate, "kvtide_is_times_as_fast_as": ratios(rate)}, indent=2))


if __name__ == "__main__":
    main()
