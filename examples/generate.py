"""Answer a few prompts with a transformers model over elastic pools, and show the text as it comes.

python examples/generate.py [MODEL]

MODEL is a folder, a .gguf file or a hub name; Gemma 3 270M if left out.
"""

from __future__ import annotations

import sys

from kvtide.engine import LLM, Loaded, SamplingParams

PROMPTS = [
    "The three primary colours are",
    "A short poem about the sea:\n",
    "def factorial(n):\n",
]


def main(model: str | Loaded | None = None) -> list[str]:
    texts = [""] * len(PROMPTS)
    with LLM(model, memory_bytes=128 << 20, max_tokens=1024) as llm:
        for index, delta in llm.stream(PROMPTS, SamplingParams(max_tokens=32, stop=("\n\n",))):
            texts[index] += delta.text
            if delta.finish is not None:
                print(f"[{delta.finish.value}] {PROMPTS[index]}{texts[index]}\n")
        print(f"{llm.kv.snapshot().hit_tokens} prompt tokens came from the cache")
    return texts


if __name__ == "__main__":
    main(*sys.argv[1:2])
