"""Tiny models with random weights, one per class of model, and what transformers makes of them."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import transformers
from tests.torch.tiny_attention import ATTENTION
from tests.torch.tiny_latent import LATENTS
from tests.torch.tiny_media import MEDIA
from tests.torch.tiny_state import STATES
from transformers import AutoConfig, AutoModelForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VOCAB = 256

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": None,  # its embedding would be zero, and all index scores of it equal
    "bos_token_id": 1,
    "eos_token_id": None,  # generation stops by length only
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
CONFIGS: dict[str, dict[str, Any]] = ATTENTION | LATENTS | STATES
FAMILIES = tuple(CONFIGS)
"""Every class that is a text model, or brings one that has no class of its own."""

WRAPPERS = tuple(MEDIA)
"""Classes that wrap one of those, or of another maker, with encoders of other media."""

KINDS = (
    "qwen3",
    "gemma3_text",
    "gemma4_text",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "minimax_m3_vl_text",
    "mistral_large4",
    "glm5_next",
    "kimi_linear",
    "minimax",
    "nemotron_h",
    "qwen3_next",
    "qwen4_exp_text",
)
"""Families that between them have every kind of cache layer, tested with more sizes."""

EQUAL_ROWS = ("deepseek_v4", "minimax_m3_vl_text")
"""Families that fold or select blocks of columns, so that padding would shift the blocks."""

ATTENTION_ONLY = tuple(f for f in (*ATTENTION, *LATENTS) if f not in EQUAL_ROWS)
"""Families whose rows may compute different numbers of tokens in one forward."""

PADDED_DTYPES = {"gemma2": torch.float32, "vaultgemma": torch.float32}
"""Where padded prompts need it: their softmax in float32 overflows at the least float64."""

FOLD = {"deepseek_v4": 8}
"""What block sizes must be multiples of."""

# Not among the causal models that transformers finds by configuration.
CLASSES: dict[str, str] = {
    "glm5_next": "Glm5NextForConditionalGeneration",
    "mistral4": "Mistral4ForCausalLM",
    "mistral_large4": "MistralLarge4ForConditionalGeneration",
} | {family: name for family, (name, _) in MEDIA.items()}


@cache
def tiny_model(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model of this family with fixed random weights, in evaluation mode."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = _build(_config(family), CLASSES.get(family), dtype)
    model.generation_config.eos_token_id = None  # generation stops by length only
    return model.eval()


def _config(family: str) -> PreTrainedConfig:
    given = dict(MEDIA[family][1] if family in MEDIA else CONFIGS[family])
    if "text_config" in given:
        given["text_config"] = COMMON | given["text_config"]
        return AutoConfig.for_model(family, tie_word_embeddings=False, **given)
    return AutoConfig.for_model(family, **(COMMON | given))


def _build(config: PreTrainedConfig, name: str | None, dtype: torch.dtype) -> PreTrainedModel:
    settings: dict[str, Any] = {"dtype": dtype, "experts_implementation": "eager"}
    if name is None:
        return AutoModelForCausalLM.from_config(config, **settings)
    return getattr(transformers, name)._from_config(config, **settings)


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    """Token ids [1, length], none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (1, length), generator=generator)


_ANSWERS: WeakKeyDictionary[PreTrainedModel, dict[bytes, list[int]]] = WeakKeyDictionary()


def expected(model: PreTrainedModel, ids: torch.Tensor, count: int) -> list[int]:
    """What transformers generates greedily with its own cache, from ids [1, n]."""
    answers = _ANSWERS.setdefault(model, {})
    key = ids.numpy().tobytes()
    if len(answers.get(key, ())) < count:
        answers[key] = _generated(model, ids, count)
    return answers[key][:count]


@torch.no_grad()
def _generated(model: PreTrainedModel, ids: torch.Tensor, count: int) -> list[int]:
    mask = torch.ones_like(ids)  # else a generated token that is the padding's would count as such
    out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
    return out[0, ids.shape[1] :].tolist()
