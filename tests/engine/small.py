"""A small engine, and prompts that between them do everything to its caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..torch.tiny import expected, prompt

if TYPE_CHECKING:
    from kvtide.engine.llm import Settings

SMALL: Settings = {
    "memory_bytes": 8 << 20,
    "max_sequences": 4,
    "max_tokens": 160,
    "block_tokens": 4,
    "chunk_tokens": 24,
    "granule_bytes": 4096,
}


def make_prompts() -> list[list[int]]:
    """Seven prompts of different lengths; three begin alike, and one of them is asked twice."""
    shared = prompt(45, seed=9)[0].tolist()
    tails = [prompt(n, seed=n)[0].tolist() for n in (3, 11, 20)]
    alone = [prompt(n, seed=n)[0].tolist() for n in (1, 30, 70)]
    return [*[shared + tail for tail in tails], *alone, shared + tails[0]]


def right(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """What transformers answers to each of them alone."""
    return [expected(model, torch.tensor([ids]), count) for ids in prompts]
