"""Where configurations come from: files, dicts, transformers; and the text model inside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from kvtide.errors import ConfigError
from kvtide.layout.fields import Fields

_INNER = ("text_config", "llm_config", "language_config", "thinker_config")
_INHERITED = ("model_type", "dtype", "torch_dtype")
_NATIVE = {
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "dim": "hidden_size",
}


@runtime_checkable
class HasDict(Protocol):
    """A configuration object of transformers."""

    def to_dict(self) -> dict[str, object]:
        """All its fields."""
        ...


def read_fields(config: object) -> Fields:
    """The fields of the text model that a configuration describes.

    `config` is a mapping, the path of a config.json or of its folder, or a configuration object of
    transformers. Encoders of other media beside the text model cache nothing and are left out.
    """
    values = _values(config)
    if "model_type" not in values and {"n_layers", "kv_lora_rank"} <= values.keys():
        values = _from_native(values)
    while (inner := _inner(values)) is not None:
        if inner.get("is_encoder_decoder") or values.get("is_encoder_decoder"):
            break
        values = {**inner, **{k: values.get(k) for k in _INHERITED if inner.get(k) is None}}
    if values.get("is_encoder_decoder"):
        raise ConfigError(
            "is_encoder_decoder is true; layouts are for decoder-only models: "
            "build this one with Layout.from_layers"
        )
    family = values.get("model_type")
    where = f"the {family!r} configuration" if family else "the configuration"
    if isinstance(config, HasDict):
        return Fields(values, where, "set it on the configuration object")
    return Fields(
        values,
        where,
        "add it, or pass the transformers configuration object, which has its class's defaults",
    )


def _values(config: object) -> Mapping[str, object]:
    if isinstance(config, str | Path):
        return _load(Path(config))
    if isinstance(config, HasDict) and not isinstance(config, type):
        return config.to_dict()
    if isinstance(config, Mapping):
        return cast("Mapping[str, object]", config)
    raise ConfigError(
        f"config is {config!r}; pass a dict, the path of a config.json, "
        "or a configuration object of transformers"
    )


def _load(path: Path) -> dict[str, object]:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {file}: {error.strerror}; pass the path of a config.json"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON: {error}; pass a model's config.json") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds a {type(values).__name__}; a config.json holds an object")
    return cast("dict[str, object]", values)


def _inner(values: Mapping[str, object]) -> dict[str, object] | None:
    """The configuration of the text model inside a composite one."""
    found = (values.get(name) for name in _INNER)
    return next((cast("dict[str, object]", it) for it in found if isinstance(it, dict)), None)


def _from_native(values: Mapping[str, object]) -> dict[str, object]:
    """DeepSeek's own inference configuration in the field's names.

    Its `dtype` is that of the weights, so it says nothing about caches.
    """
    renamed = {_NATIVE.get(name, name): value for name, value in values.items() if name != "dtype"}
    model_type = "deepseek_v32" if "index_head_dim" in values else "deepseek_v3"
    return {**renamed, "model_type": model_type}
