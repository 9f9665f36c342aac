"""Families that are read as plain keys and values: their classes must cache just that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.torch.tiny import COMMON
from transformers import AutoConfig, AutoModelForCausalLM

from kvtide import Layout
from kvtide.layout import Window
from kvtide.layout.families import FAMILIES

NUM_TOKENS = 12
SMALL: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not what division gives, so that a field that is ignored shows
    "ffn_dim": 96,
    "moe_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
}
OURS = [
    "deepseek",
    "glm",
    "gpt_oss",
    "mistral",
    "mixtral",
    "ministral",
    "kimi",
    "minimax",
    "nemotron",
    "qwen",
    "gemma",
    "llama4",
]
OTHERS = sorted(name for name in FAMILIES if not name.startswith(tuple(OURS)))


def small(name: str) -> Any:
    """A configuration of a few layers, every field that the class has."""
    known = AutoConfig.for_model(name).to_dict()
    sizes = {**COMMON, **SMALL, "hidden_size": 128}
    if known.get("sliding_window") is not None:
        sizes["sliding_window"] = 8
    if known.get("layer_types"):
        sizes["num_hidden_layers"] = 6  # a period of every pattern
    lists = {field for field, value in known.items() if isinstance(value, list)}
    return AutoConfig.for_model(
        name, **{k: v for k, v in sizes.items() if k in known and k not in lists}
    )


def shapes(layout: Layout) -> dict[int, list[tuple[int, ...]]]:
    """Key and value of NUM_TOKENS tokens, or the state, of every layer."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for group in layout.groups:
        kept = NUM_TOKENS
        if isinstance(group.lifetime, Window):
            kept = min(NUM_TOKENS, group.lifetime.tokens - 1)
        for layer in group.layers:
            found[layer] = [
                b.shape if group.is_state else (b.shape[0], kept, b.shape[1]) for b in group.buffers
            ]
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", OTHERS)
def test_layout_is_what_the_class_caches(name: str) -> None:
    config = small(name)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = model(torch.randint(3, 100, (1, NUM_TOKENS)), use_cache=True).cache
    held = {
        number: [tuple(it.shape[1:]) for it in tensors]
        for number, layer in enumerate(cache.layers)
        if (tensors := [*_tensors(layer)])
    }
    layout = Layout.from_config(config, block_tokens=4, kv_dtype="float32")
    assert shapes(layout) == held


def _tensors(layer: Any) -> list[torch.Tensor]:
    """Everything a cache layer holds of a sequence."""
    found: list[torch.Tensor] = []
    for value in vars(layer).values():
        parts = value.values() if isinstance(value, dict) else [value]
        found += [part for part in parts if isinstance(part, torch.Tensor) and part.dim() > 1]
    return found
