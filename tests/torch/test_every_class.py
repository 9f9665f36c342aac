"""No class of the nine families that generates is forgotten."""

from __future__ import annotations

import re
from pathlib import Path

import transformers
from tests.torch.tiny import CLASSES, FAMILIES, WRAPPERS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PREFIXES = re.compile(
    r"deepseek|glm|gpt_oss|mi(s|x|nis)tral|voxtral|kimi|minimax|nemotron|qwen|.*gemma"
)
GENERATES = re.compile(r"^class (\w+)\([^)]*GenerationMixin", re.MULTILINE)

PAGE = Path(__file__).parents[2] / "docs" / "families.md"


def listed(heading: str, columns: slice) -> list[str]:
    """What stands between backticks in these columns of the table under a heading of the page."""
    _, _, after = PAGE.read_text().partition(heading)
    rows = [line for line in after.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    cells = [cell for row in rows[1:] for cell in row.split("|")[columns]]
    return re.findall(r"`(\w+)`", "\n".join(cells))


def test_the_page_names_the_classes_that_are_tested() -> None:
    assert sorted(listed("# Models", slice(2, 4))) == sorted({*FAMILIES, *WRAPPERS})


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
    refused = set(listed("## Not supported", slice(1, 2)))
    assert supported.isdisjoint(refused)
    assert supported | refused == found
