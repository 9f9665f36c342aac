"""No class of the nine families that generates is forgotten."""

from __future__ import annotations

import re
from pathlib import Path

import transformers
from tests.torch.tiny import CLASSES, FAMILIES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PREFIXES = re.compile(
    r"deepseek|glm|gpt_oss|mi(s|x|nis)tral|voxtral|kimi|minimax|nemotron|qwen|.*gemma"
)
GENERATES = re.compile(r"^class (\w+)\([^)]*GenerationMixin", re.MULTILINE)

TWIN = "decodes with keys and values that another model hands it, and caches nothing itself"
SPEECH = "generates speech, not text"
ENCODER = "is an encoder and a decoder: its cross-attention reads no prefix of a prompt"
TRANSDUCER = "is a transducer over audio frames: there is no prompt whose keys could be cached"

UNSUPPORTED = {
    "DiffusionGemmaForBlockDiffusion": "denoises blocks of tokens that read each other, both ways",
    "Gemma3nForConditionalGeneration": "needs the timm package; its text class is supported",
    "Gemma4AssistantForCausalLM": TWIN,
    "Gemma4UnifiedAssistantForCausalLM": TWIN,
    "GlmImageForConditionalGeneration": "generates images, not text",
    "Nemotron3_5AsrForRNNT": TRANSDUCER,
    "Nemotron3_5TranscribeForConditionalGeneration": "transcribes audio; its decoder, Nemotron-H, "
    "is supported",
    "NemotronAsrStreamingForRNNT": TRANSDUCER,
    "PaliGemmaForConditionalGeneration": "the tokens of a prompt read those after them",
    "Qwen2_5OmniForConditionalGeneration": "runs a thinker, a talker and a vocoder; its thinker is "
    "supported",
    "Qwen2_5OmniTalkerForConditionalGeneration": SPEECH,
    "Qwen3OmniMoeForConditionalGeneration": "as Qwen2.5-Omni",
    "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration": SPEECH,
    "Qwen3OmniMoeTalkerForConditionalGeneration": SPEECH,
    "RecurrentGemmaForCausalLM": "keeps its states in buffers of its modules, not in a cache",
    "T5Gemma2ForConditionalGeneration": ENCODER,
    "T5GemmaForConditionalGeneration": ENCODER,
    "VoxtralRealtimeForConditionalGeneration": "adds a piece of audio to every token it generates",
}
"""Why the other classes are not supported."""


def test_every_class_is_supported_or_listed_with_the_reason() -> None:
    models = Path(transformers.__file__).parent / "models"
    found = {
        name
        for folder in models.iterdir()
        if PREFIXES.match(folder.name)
        for file in folder.glob("modeling_*.py")
        for name in GENERATES.findall(file.read_text())
    }
    supported = {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(f) for f in FAMILIES if f not in CLASSES}
    supported |= set(CLASSES.values())
    assert supported.isdisjoint(UNSUPPORTED)
    assert supported | set(UNSUPPORTED) == found
