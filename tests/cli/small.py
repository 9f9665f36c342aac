"""A model, a tokenizer and a traffic small enough to run the whole demo in seconds."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from kvtide.cli.demo.traffic import Size
from kvtide.engine import Loaded

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SIZE = Size(
    first_chats=6,
    documents=2,
    questions=3,
    last_chats=4,
    system_tokens=48,
    document_tokens=300,
    answer_tokens=6,
)


class Bytes:
    """A tokenizer of one byte a token, after a first token 1."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1, *(3 + byte % 250 for byte in text.encode())]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        del skip_special_tokens
        return "".join(chr(token) for token in token_ids)

    def save_pretrained(self, save_directory: object) -> None:
        raise NotImplementedError


@cache
def loaded() -> Loaded:
    """A Gemma 3 with random weights, a window of 64 tokens and no end-of-turn token."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma3_text",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=6,
        sliding_window=64,
        query_pre_attn_scalar=16,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Loaded(model=model.eval(), tokenizer=Bytes(), name="tiny", terms="terms of tiny")


def save_tiny(folder: Path) -> Path:
    """A model folder for processes of their own: a Gemma 3 of four layers, one byte a token."""
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {"<bos>": 0} | {letter: 1 + i for i, letter in enumerate(letters)}
    bytes_only = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = ByteLevelDecoder()
    bytes_only.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=bytes_only, bos_token="<bos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma3_text",
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=64,
        query_pre_attn_scalar=16,
        max_position_embeddings=2048,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=None,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
