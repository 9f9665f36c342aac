"""The request lists of this benchmark: fixed seed, standard library only.

`prefill`: multi-turn conversations over shared system prompts. `decode`: long histories that grow
by one token a step. The same lists were fed to other engines' managers, so figures can be laid side
by side.
"""

from __future__ import annotations

import random
from array import array

SEED = 20261129
VOCABULARY = 128_000
IN_FLIGHT = 16
"""Requests open at the same time in the prefill list."""


def prefill(num_requests: int = 2000) -> list[array[int]]:
    """Prompts of 2k-8k tokens: 96 live conversations growing by 200-400 tokens a turn.

    They share 16 system prompts of 1,024 tokens. In arrival order.
    """
    rng = random.Random(SEED)

    def words(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    systems = [words(1024) for _ in range(16)]

    def conversation() -> array[int]:
        return array("q", systems[rng.randrange(16)] + words(rng.randint(1024, 3072)))

    live = [conversation() for _ in range(96)]
    prompts: list[array[int]] = []
    while len(prompts) < num_requests:
        i = rng.randrange(96)
        prompts.append(array("q", live[i]))
        if rng.random() < 0.08 or len(live[i]) + 600 > 8192:
            live[i] = conversation()
        else:
            live[i].extend(words(rng.randint(200, 400)))
    return prompts


def unique_blocks(prompts: list[array[int]], block_tokens: int) -> int:
    """Distinct whole blocks over all prompts, by content and prefix."""
    seen: set[int] = set()
    for prompt in prompts:
        chain = 0
        for start in range(0, len(prompt) - len(prompt) % block_tokens, block_tokens):
            chain = hash((chain, bytes(prompt[start : start + block_tokens])))
            seen.add(chain)
    return len(seen)


def decode(num_sequences: int = 256, history: int = 4096) -> list[array[int]]:
    """Prompts of about 4k tokens whose lengths are spread over a block."""
    rng = random.Random(SEED + 1)
    return [
        array("q", [rng.randrange(VOCABULARY) for _ in range(history + rng.randrange(64))])
        for _ in range(num_sequences)
    ]
