"""What the planner reads of a model's configuration beside its layout: a name and a length."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from kvtide.layout.fields import Fields

_LENGTHS = ("max_position_embeddings", "max_seq_len", "model_max_length", "n_positions")


def model_name(config: object, fields: Fields) -> str:
    """What to call the model: the configuration's folder or file, or what it calls itself."""
    if isinstance(config, str | Path):
        path = Path(config).resolve()
        return path.parent.name if path.name == "config.json" else path.stem or str(path)
    name = fields.text_or_none("_name_or_path", "name_or_path", "model_type")
    return name or "model"


def longest_sequence(fields: Fields) -> int:
    """Tokens of the longest sequence the model is made for; ConfigError if that is not said."""
    found = fields.size_or_none(*_LENGTHS)
    if found is None:
        raise ConfigError(
            f"{fields.where} has no max_position_embeddings; give max_tokens, the longest sequence "
            "to plan for"
        )
    return found
