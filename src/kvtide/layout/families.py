"""The model families: how each says what its layers are, and what a layer of each kind stores."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from kvtide.layout import kinds as rule
from kvtide.layout import reader as attention
from kvtide.layout import states, stores

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtide.layout.fields import Fields
    from kvtide.layout.kinds import Kind
    from kvtide.layout.reader import Reader
    from kvtide.layout.spec import Spec

    Stores: TypeAlias = Callable[[Reader, int], tuple[Spec, ...]]

HEADS: Mapping[Kind, Stores] = MappingProxyType(
    {
        "full": attention.full,
        "sliding": attention.sliding,
        "chunked": attention.chunked,
        "none": attention.nothing,
    }
)
"""Layers that cache keys and values of heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models that are read alike.

    `kinds(fields, num_layers)` is the kind of every layer, `stores[kind](reader, layer)` what it
    caches, `drafts` the kind of the model's own layers for multi-token prediction. `divides`,
    `pairs`: see `Reader`. `reuses(fields, kinds)` gives for every layer the one whose keys and
    values it reads.
    """

    kinds: Callable[[Fields, int], list[Kind]]
    stores: Mapping[Kind, Stores] = field(default_factory=lambda: HEADS)
    divides: bool = False
    pairs: bool = False
    drafts: Kind = "full"
    reuses: Callable[[Fields, list[Kind]], list[int]] | None = None


_PLAIN = Family(kinds=rule.from_window(None))
_LATENT = Family(kinds=rule.every("full"), stores={"full": attention.latent})
_INDEXED_LATENT = Family(
    kinds=rule.every("indexed"), stores={"indexed": stores.indexed_latent}, drafts="indexed"
)
_MISTRAL_LARGE = Family(
    kinds=rule.every("indexed"),
    stores={"indexed": stores.mistral_large},
    drafts="indexed",
    reuses=stores.source_layers,
)
_GLM5_NEXT = Family(
    kinds=rule.delta_attention("indexed"),
    stores={"indexed": stores.pooled_index, "linear": states.kimi_delta_attention},
    drafts="indexed",
)
_DELTA_NET = Family(
    kinds=rule.at_intervals("linear", "full"),
    stores={**HEADS, "linear": states.gated_delta_net},
)
_QWEN2 = Family(kinds=rule.qwen(rule.late), divides=True)
_QWEN2_MOE = Family(kinds=rule.qwen(rule.early_every_other), divides=True)
_QWEN3 = Family(kinds=rule.qwen(rule.late))
_QWEN4 = Family(
    kinds=rule.at_intervals("linear", "indexed"),
    stores={"indexed": stores.query_sparse, "linear": states.gated_delta_net},
    drafts="indexed",
)
_M3 = Family(kinds=rule.minimax, stores={**HEADS, "indexed": stores.block_sparse})
_LIGHTNING = Family(
    kinds=rule.lightning,
    stores={**HEADS, "linear": states.lightning_attention},
    divides=True,
)
_GEMMA3 = Family(kinds=rule.from_window(6, windowed=True))
_GEMMA3N = Family(
    kinds=rule.from_window(5, windowed=True), reuses=stores.last_of_type(must_say=True)
)
_GEMMA4 = Family(
    kinds=rule.last_is_full(rule.from_window(6, windowed=True)),
    stores={**HEADS, "full": stores.gemma4_full},
    reuses=stores.last_of_type(must_say=False),
)

_OURS: dict[str, Family] = {
    # DeepSeek
    "deepseek_ocr2_text": Family(kinds=rule.every("full"), divides=True, pairs=True),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _INDEXED_LATENT,
    "deepseek_v4": Family(
        kinds=rule.deepseek_v4,
        stores={
            "sliding": states.v4_window,
            "folded": states.folded,
            "folded_indexed": states.folded_indexed,
        },
        drafts="sliding",
    ),
    # GLM
    "glm": _PLAIN,
    "glm4": _PLAIN,
    "glm4_moe": _PLAIN,
    "glm4_moe_lite": _LATENT,
    "glm4v_text": Family(kinds=rule.from_window(None), divides=True),
    "glm4v_moe_text": _PLAIN,
    "glm_ocr_text": Family(kinds=rule.from_window(None), divides=True),
    "glm_moe_dsa": _INDEXED_LATENT,
    "glm5_next": _GLM5_NEXT,
    "glm5_next_text": _GLM5_NEXT,
    # GPT-OSS
    "gpt_oss": Family(kinds=rule.from_window(2, windowed=True)),
    # Mistral
    "mistral": Family(kinds=rule.from_window("all", windowed=True), divides=True),
    "mixtral": Family(kinds=rule.from_window("all"), divides=True),
    "ministral": Family(kinds=rule.from_window("all", windowed=True), divides=True),
    "ministral3": Family(kinds=rule.from_window("all"), divides=True),
    "mistral4": _LATENT,
    "mistral_large4": _MISTRAL_LARGE,
    "mistral_large4_text": _MISTRAL_LARGE,
    # Kimi
    "kimi_k2": _LATENT,
    "kimi_k25": _LATENT,
    "kimi_linear": Family(
        kinds=rule.delta_attention("full"),
        stores={"full": attention.latent, "linear": states.kimi_delta_attention},
    ),
    # MiniMax
    "minimax": _LIGHTNING,
    "minimax_m1": _LIGHTNING,
    "minimax_text_01": _LIGHTNING,
    "minimax_m2": Family(kinds=rule.minimax),
    "minimax_m3": _M3,
    "minimax_m3_vl": _M3,
    "minimax_m3_vl_text": _M3,
    # Nemotron
    "nemotron": Family(kinds=rule.every("full"), divides=True, pairs=True),
    "nemotron-nas": Family(
        kinds=rule.every("full"), stores={"full": stores.searched}, divides=True
    ),
    "nemotron_h": Family(kinds=rule.nemotron_h, stores={**HEADS, "linear": states.mamba2}),
    # Qwen
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_5_omni_text": _QWEN2,
    "qwen2_moe": _QWEN2_MOE,
    "qwen3": _QWEN3,
    "qwen3_moe": Family(kinds=rule.qwen(None)),
    "qwen3_vl_text": _PLAIN,
    "qwen3_vl_moe_text": _PLAIN,
    "qwen3_omni_moe_text": Family(kinds=rule.qwen(None)),
    "qwen3_next": _DELTA_NET,
    "qwen3_5": _DELTA_NET,
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe": _DELTA_NET,
    "qwen3_5_moe_text": _DELTA_NET,
    "qwen4_exp": _QWEN4,
    "qwen4_exp_text": _QWEN4,
    # Gemma
    "gemma": Family(kinds=rule.every("full")),
    "gemma2": Family(kinds=rule.from_window(2, windowed=True)),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma3n": _GEMMA3N,
    "gemma3n_text": _GEMMA3N,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "vaultgemma": Family(kinds=rule.from_window(None, windowed=True)),
}

# The classes of these cache plain keys and values too, which tests/torch/test_other_families.py
# holds against them. What sets them apart is which absent sizes their own code fills in.
_STRICT = ["ernie4_5", "helium", "internlm3", "sarvam_moe", "seed_oss", "solar_open"]
_DIVIDING = ["bitnet", "ernie4_5_moe", "phimoe", "smollm3", "stablelm", "starcoder2"]
_PAIRING = [
    "apertus",
    "arcee",
    "aria_text",
    "cohere",
    "diffllama",
    "doge",
    "flex_olmo",
    "gpt_neox",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hyperclovax",
    "jais2",
    "llama",
    "nanochat",
    "olmo",
    "olmo2",
    "olmoe",
    "opt",
    "persimmon",
    "phi",
    "phi3",
]

_OTHERS: dict[str, Family] = {
    **dict.fromkeys(_STRICT, _PLAIN),
    **dict.fromkeys(_DIVIDING, Family(kinds=rule.from_window(None), divides=True)),
    **dict.fromkeys(_PAIRING, Family(kinds=rule.from_window(None), divides=True, pairs=True)),
    "afmoe": Family(kinds=rule.from_window(None, windowed=True), pairs=True),
    "cohere2": Family(kinds=rule.from_window(4, windowed=True), divides=True, pairs=True),
    "cohere2_moe": Family(kinds=rule.from_window(4, windowed=True), pairs=True),
    "cwm": Family(kinds=rule.from_window(None, windowed=True)),
    "exaone4": Family(kinds=rule.from_window(None, windowed=True), divides=True),
    "exaone_moe": Family(kinds=rule.from_window(None, windowed=True), divides=True),
    "olmo3": Family(kinds=rule.from_window(4, windowed=True), divides=True, pairs=True),
    "llama4_text": Family(kinds=rule.llama4),
    "lfm2": Family(
        kinds=rule.lfm2, stores={**HEADS, "conv": states.short_convolution}, divides=True
    ),
}

FAMILIES: Mapping[str, Family] = MappingProxyType({**_OURS, **_OTHERS})
"""By `model_type`: the nine families, then others that are read the same way."""
