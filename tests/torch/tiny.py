"""Tiny models with random weights, one per kind of cache, and what transformers makes of them."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB = 256

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,  # generation stops by length only
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}

# Windows and index_topk of 16 are outgrown by every test.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {**GROUPED, "num_hidden_layers": 3},
    "gemma3_text": {
        **GROUPED,
        "num_hidden_layers": 6,
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
    },
    "gpt_oss": {
        **GROUPED,
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "qwen3_next": {
        **GROUPED,
        "num_hidden_layers": 4,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "nemotron_h": {
        **GROUPED,
        "layers_block_type": ["mamba", "moe", "attention", "mamba", "moe", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": None,
    },
    "deepseek_v32": {
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        # Many heads: with few, ReLU makes many index scores exactly 0, and which of equal scores
        # is among the top 16 depends on the padding.
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 16,
    },
}
FAMILIES = tuple(CONFIGS)
ATTENTION_ONLY = ("qwen3", "gemma3_text", "gpt_oss", "deepseek_v32")


@cache
def tiny_model(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model of this family with fixed random weights, in evaluation mode."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **COMMON, **CONFIGS[family])
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    return model.eval()


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    """Token ids [1, length], none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (1, length), generator=generator)


@torch.no_grad()
def expected(model: PreTrainedModel, ids: torch.Tensor, count: int) -> list[int]:
    """What transformers generates greedily with its own cache, from ids [1, n]."""
    out = model.generate(ids, max_new_tokens=count, do_sample=False)
    return out[0, ids.shape[1] :].tolist()
