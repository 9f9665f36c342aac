"""One of several processes that serve tiny models together; started by `test_ranks.py`.

    python -m tests.engine.ranks_worker CASE RANK SIZE FOLDER

What it found is written to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from itertools import cycle, permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvtide import Move
from kvtide.engine import LLM, SamplingParams
from kvtide.engine.parallel import DataRanks, PipelineRanks, TensorRanks
from kvtide.errors import KvError
from kvtide.ranks import Change

from ..torch.tiny import COMMON, tiny_model
from ..torch.tiny_attention import GEMMA, GROUPED
from .small import SMALL, make_prompts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from kvtide.engine import RequestOutput
    from kvtide.engine.llm import Settings

ANSWER = 12
SLIDING, FULL = "sliding_attention", "full_attention"
MIXED: dict[str, Any] = {
    **GEMMA,
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixed": ("gemma3_text", MIXED),
    "one head": ("gemma3_text", {**MIXED, "num_key_value_heads": 1}),
    "full": ("qwen3", {**GROUPED, "num_hidden_layers": 3}),
    "separate": ("gemma3_text", {**MIXED, "layer_types": [SLIDING] * 3 + [FULL] * 2}),
}


KINDS = {"tensor": TensorRanks, "pipeline": PipelineRanks, "data": DataRanks}


def build(name: str) -> PreTrainedModel:
    """A model of double precision, so that the order of a sum does not turn a token over."""
    if name not in MODELS:
        return tiny_model(name)
    torch.manual_seed(0)
    family, given = MODELS[name]
    config = AutoConfig.for_model(family, **{**COMMON, **given})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model.generation_config.eos_token_id = None
    return model.eval()


def settings(kib: int) -> Settings:
    return {**SMALL, "memory_bytes": kib << 10}


def moves(llm: LLM, axis: str) -> Iterator[Change]:
    """Changes in all directions, by turns."""
    kv = llm.kv
    for donor, receiver in cycle(permutations(kv.pools, 2)):
        facts = kv.snapshot().pools
        if axis == "pipeline":
            gives = max(1, (facts[donor].pages - facts[donor].used) // 2)
            takes = facts[receiver].pages + gives
            yield Change(pages={donor: facts[donor].pages - gives, receiver: takes})
        else:
            yield Change(plan=(Move(donor=donor, receiver=receiver, granules=2, reason="forced"),))


def serve(llm: LLM, place: Any, *, forced: bool) -> list[RequestOutput]:
    """All prompts twice, the second time with some of them in the cache; outputs of all ranks."""
    changes = moves(llm, place.axis)
    answers: list[RequestOutput] = []
    for _ in range(2):
        ids = [llm.add(prompt, SamplingParams(max_tokens=ANSWER)) for prompt in make_prompts()]
        steps = 0
        while llm.has_work:
            if forced and steps % 4 == 0:
                place.agreement.propose(next(changes))
            llm.step()
            llm.kv.check()
            steps += 1
        outputs = {i: out for i in ids if (out := llm.take(i)) is not None}
        outputs = place.collect(outputs)
        answers += [outputs[i] for i in ids]
    return answers


def report(llm: LLM, place: Any, outputs: list[RequestOutput]) -> dict[str, Any]:
    facts = place.agreement.facts()
    pools = llm.kv.snapshot().pools
    return {
        "answers": [list(output.token_ids) for output in outputs],
        "preempted": sum(output.num_preempted for output in outputs),
        "page_bytes": {name: pool.page_bytes for name, pool in pools.items()},
        "pages": {name: pool.pages for name, pool in pools.items()},
        "moved": llm.kv.moved[0],
        "steps": facts.steps,
        "commits": facts.commits,
        "pauses": facts.pauses,
    }


def run(place: Any, model: str, kib: int, *, forced: bool) -> dict[str, Any]:
    with LLM(build(model), ranks=place, **settings(kib)) as llm:
        found = report(llm, place, serve(llm, place, forced=forced))
        outputs = llm.generate(make_prompts(), SamplingParams(max_tokens=ANSWER))
        return {**found, "generated": [list(output.token_ids) for output in outputs]}


class WronglySplit(TensorRanks):
    """As if one rank had not understood its part of the model."""

    def _split(self, model: PreTrainedModel) -> None:
        super()._split(model)
        if self.rank == 1:
            down: Any = model.base_model.layers[0].mlp.down_proj
            down.weight.mul_(1.01)


def refusal(place: Any, model: str) -> str:
    try:
        LLM(build(model), ranks=place, **settings(1024)).close()
    except KvError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def serving(rank: int) -> dict[str, Any]:
    every, deadline = 2, 60.0
    tensor, pipeline, data = (
        (lambda kind=kind: kind(every=every, deadline=deadline)) for kind in KINDS.values()
    )
    return {
        "tensor": run(tensor(), "mixed", 160, forced=False),
        "tensor, proposed": run(tensor(), "mixed", 160, forced=True),
        "tensor, one head": run(tensor(), "one head", 160, forced=False),
        "pipeline": run(pipeline(), "mixed", 300, forced=True),
        "pipeline, tight": run(pipeline(), "full", 168 + 40 * rank, forced=False),
        "data": run(data(), "mixed", 300, forced=True),
        "refused: experts by tensors": refusal(tensor(), "qwen3_moe"),
        "refused: states by layers": refusal(pipeline(), "qwen3_next"),
        "refused: other logits": refusal(WronglySplit(deadline=deadline), "mixed"),
        "refused: kinds apart": refusal(pipeline(), "separate"),
    }


def failing(place: Any, how: str) -> dict[str, Any]:
    """Rank 1 fails at its tenth step; what the others see."""
    steps: list[object] = []

    def fail(step: object) -> None:
        steps.append(step)
        if place.rank == 1 and len(steps) == 10:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("out of order")

    try:
        with LLM(build("mixed"), ranks=place, on_step=fail, **settings(1024)) as llm:
            serve(llm, place, forced=False)
    except (KvError, ValueError) as error:
        return {"error": type(error).__name__, "message": str(error), "steps": len(steps)}
    return {"error": None}


def main() -> None:
    case, rank, size, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    found: dict[str, Any] = serving(rank) if case == "serving" else {}
    for number, each in enumerate(() if found else case.split(", ")):
        kind, how = each.split()
        # One that raises and stays is heard of at the deadline; the last one's end is noticed.
        found[each] = failing(KINDS[kind](every=2, deadline=6.0 if not number else 60.0), how)
        (folder / f"{rank}.json").write_text(json.dumps(found))
    (folder / f"{rank}.json").write_text(json.dumps(found))
    if case == "serving":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
