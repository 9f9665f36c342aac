"""Configurations of models whose sizes are published: what decides caching is in the documents'
models.json, and the fields that only parameters depend on are added here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

MODELS = Path(__file__).parents[3] / "docs" / "models" / "models.json"

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}

_DEEPSEEK: dict[str, Any] = {
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "quantization_config": {"quant_method": "fp8"},
    "v_head_dim": 128,
    "vocab_size": 129280,
}
_MORE: dict[str, dict[str, Any]] = {
    "gemma-3-27b-it": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "tie_word_embeddings": True,
        "vocab_size": 262144,
    },
    "gpt-oss-20b": {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_experts_per_tok": 4,
        "num_local_experts": 32,
        "quantization_config": {"quant_method": "mxfp4"},
        "vocab_size": 201088,
    },
    "Qwen3-Next-80B-A3B-Instruct": {
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 151936,
    },
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": {
        "hidden_size": 2688,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "vocab_size": 131072,
    },
    "DeepSeek-V3": _DEEPSEEK,
    "DeepSeek-V3.2": {**_DEEPSEEK, "index_n_heads": 64, "index_topk": 2048},
    "DeepSeek-V4-Flash": {
        "hc_mult": 4,
        "hidden_size": 4096,
        "index_n_heads": 64,
        "index_topk": 512,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "q_lora_rank": 1024,
        "vocab_size": 129280,
    },
    "Kimi-Linear-48B-A3B-Instruct": {
        "first_k_dense_replace": 1,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "moe_intermediate_size": 1024,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "gemma-4-26B-A4B": {
        "enable_moe_block": True,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "moe_intermediate_size": 704,
        "num_experts": 128,
        "top_k_experts": 8,
        "vocab_size": 262144,
    },
}


class Published(NamedTuple):
    """Billions of parameters, as published, and how exactly that is."""

    total: float
    active: float
    tolerance: float


SIZES = {
    "llama": Published(8.03, 7.50, 0.002),
    "gemma-3-27b-it": Published(27.0, 27.0, 0.002),
    "gpt-oss-20b": Published(20.9, 3.6, 0.004),
    "Qwen3-Next-80B-A3B-Instruct": Published(79.7, 3.6, 0.02),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Published(31.6, 3.2, 0.012),
    "DeepSeek-V3": Published(671.0, 37.0, 0.012),
    "DeepSeek-V3.2": Published(671.9, 37.5, 0.002),
    "DeepSeek-V4-Flash": Published(284.3, 13.3, 0.003),
    "Kimi-Linear-48B-A3B-Instruct": Published(49.1, 3.1, 0.01),
    "gemma-4-26B-A4B": Published(25.2, 3.8, 0.006),
}
"""The model cards, Qwen's and Kimi's totals as their weight files add up to. "Active" is counted
in several ways there, with or without embeddings; ours is what a token is multiplied with."""


def config_of(name: str) -> dict[str, Any]:
    """The configuration of a model by its name in models.json, or Llama 3.1 8B."""
    if name == "llama":
        return dict(LLAMA_8B)
    models = {model["name"]: model["fields"] for model in json.loads(MODELS.read_text())}
    return {**models[name], **_MORE[name], "dtype": "bfloat16"}
