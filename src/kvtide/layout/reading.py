"""A published model configuration -> the layout of what one rank caches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from kvtide.errors import ConfigError
from kvtide.layout.buffer import INLINE_SCALES, ITEM_BYTES, SCALED_DTYPES
from kvtide.layout.families import FAMILIES, Family
from kvtide.layout.fields import Fields
from kvtide.layout.reader import FP4_INDEX, FP8_INDEX, Reader, Storage
from kvtide.layout.spec import (
    CompressedSpec,
    DraftSpec,
    FullSpec,
    IndexerSpec,
    LatentSpec,
    Spec,
    StateSpec,
    WindowSpec,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtide.layout.kinds import Kind
    from kvtide.layout.parallel import Parallel, Speculative

    Layers = dict[int, tuple[Spec, ...]]

DEFAULT_STATE_INTERVAL = 256
"""Tokens between the places where a recurrent state may be kept for reuse, about."""

ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""Other names of dtypes that people write."""

WIDE = ("float64", "float32", "float16", "bfloat16")
"""Dtypes a model may compute in."""

_INNER = ("text_config", "llm_config", "language_config", "thinker_config")
_MTP_FIELDS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
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
    outer = values
    while (inner := _inner(values)) is not None:
        outer, values = values, inner
    if values.get("is_encoder_decoder") or outer.get("is_encoder_decoder"):
        raise ConfigError(
            "is_encoder_decoder is true; layouts are for decoder-only models: "
            "build this one with Layout.from_layers"
        )
    if "model_type" not in outer and {"n_layers", "kv_lora_rank"} <= values.keys():
        outer = values = _from_native(values)
    defaults = {k: outer[k] for k in ("model_type", "dtype", "torch_dtype") if outer.get(k)}
    values = {**defaults, **{k: v for k, v in values.items() if v is not None}}
    family = values.get("model_type")
    return Fields(values, f"the {family!r} configuration" if family else "the configuration")


def family_of(fields: Fields) -> Family:
    """The family of a configuration; ConfigError if its `model_type` is not one we know."""
    name = fields.text_or_none("model_type")
    if name is None:
        raise fields.missing("model_type")
    if name not in FAMILIES:
        raise ConfigError(
            f"model_type is {name!r}; layouts are known for {', '.join(sorted(FAMILIES))}. "
            "Build the layout of other models with Layout.from_layers, naming what each layer "
            "caches"
        )
    return FAMILIES[name]


def storage_of(
    fields: Fields,
    *,
    block_tokens: int,
    kv_dtype: str | None,
    index_dtype: str | None,
    state_dtype: str | None,
    state_interval: int | None,
) -> Storage:
    """What dtypes the caches have, of the arguments and the configuration."""
    said = fields.text_or_none("dtype", "torch_dtype")
    said = None if said is None else _plain_dtype(said.removeprefix("torch."))
    kv = said if kv_dtype in (None, "auto") else _plain_dtype(kv_dtype)
    if kv is None:
        raise ConfigError(
            f"{fields.where} has no dtype; pass kv_dtype, one of {', '.join(_KV_DTYPES)}"
        )
    if kv not in _KV_DTYPES:
        raise ConfigError(f"kv_dtype is {kv!r}; use one of {', '.join(_KV_DTYPES)}")
    index = (
        index_dtype if index_dtype in (None, FP8_INDEX, FP4_INDEX) else _plain_dtype(index_dtype)
    )
    if index not in (None, FP8_INDEX, FP4_INDEX, *ITEM_BYTES):
        known = ", ".join((FP8_INDEX, FP4_INDEX, *WIDE))
        raise ConfigError(f"index_dtype is {index!r}; use one of {known}")
    # Convolution inputs are kept as computed, whatever the keys and values are squeezed into.
    activation = kv if kv in WIDE else said if said in WIDE else "bfloat16"
    return Storage(
        kv=kv,
        index=index,
        activation=activation,
        recurrent=None if state_dtype is None else _plain_dtype(state_dtype),
        interval_tokens=state_interval
        or block_tokens * max(1, DEFAULT_STATE_INTERVAL // block_tokens),
    )


def layers_of(
    fields: Fields, storage: Storage, parallel: Parallel, speculative: Speculative | None
) -> Layers:
    """What every layer of this rank's stage caches, and the drafter's after the last of them."""
    family = family_of(fields)
    reader = Reader(fields=fields, storage=storage, parallel=parallel, derives=family.derives)
    kinds = _kinds(family, fields)
    stage = parallel.layers(len(kinds))
    layers = {layer: _stored(family, kinds[layer], reader, layer) for layer in stage}
    if family.reuses is not None:
        _drop_reused(layers, family.reuses(fields, kinds))
    if speculative is not None and parallel.stage == parallel.pipeline - 1:
        layers |= _drafter(family, reader, speculative, first=len(kinds))
    layers = {layer: specs for layer, specs in layers.items() if specs}
    if not layers:
        raise ConfigError(
            f"layers {stage.start} to {stage.stop - 1} of {fields.where}, stage {parallel.stage}, "
            "cache nothing; give the stage one that does with Parallel(stages=...)"
        )
    return layers


def _values(config: object) -> dict[str, object]:
    if isinstance(config, str | Path):
        return _load(Path(config))
    if isinstance(config, HasDict):
        return config.to_dict()
    if isinstance(config, dict):
        return cast("dict[str, object]", config)
    raise ConfigError(
        f"config is a {type(config).__name__}; pass a dict, the path of a config.json, "
        "or a configuration object of transformers"
    )


def _inner(values: Mapping[str, object]) -> dict[str, object] | None:
    """The configuration of the text model inside a composite one."""
    found = (values.get(name) for name in _INNER)
    return next((cast("dict[str, object]", it) for it in found if isinstance(it, dict)), None)


def _load(path: Path) -> dict[str, object]:
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {file}: {error.strerror}; pass the path of a config.json"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}; pass a model's config.json") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds a {type(values).__name__}; a config.json holds an object")
    return cast("dict[str, object]", values)


def _from_native(values: Mapping[str, object]) -> dict[str, object]:
    """DeepSeek's own inference configuration in the field's names.

    Its `dtype` is that of the weights, so it says nothing about caches.
    """
    renamed = {_NATIVE.get(name, name): value for name, value in values.items() if name != "dtype"}
    model_type = "deepseek_v32" if "index_head_dim" in values else "deepseek_v3"
    return {**renamed, "model_type": model_type}


def _plain_dtype(name: str) -> str:
    return ALIASES.get(name, name)


def _kinds(family: Family, fields: Fields) -> list[Kind]:
    pattern = fields.text_or_none("hybrid_override_pattern")
    blocks = fields.listed("layers_block_type")
    listed = len(pattern) if pattern is not None else None if blocks is None else len(blocks)
    said = fields.size_or_none("num_hidden_layers")
    if said is None and listed is None:
        raise fields.missing("num_hidden_layers")
    if said is not None and listed is not None and said != listed:
        raise ConfigError(
            f"num_hidden_layers of {fields.where} is {said}, but it lists {listed} layers; "
            "correct one of them"
        )
    return family.kinds(fields, said or listed or 0)


def _stored(family: Family, kind: Kind, reader: Reader, layer: int) -> tuple[Spec, ...]:
    if kind not in family.stores:
        known = ", ".join(family.stores)
        raise reader.fields.unknown("layer_types", kind, f"{known} for this model")
    return family.stores[kind](reader, layer)


def _drop_reused(layers: Layers, sources: list[int]) -> None:
    """Leave layers that read another's keys and values nothing but index keys of their own."""
    for layer, specs in layers.items():
        source = sources[layer]
        if source == layer:
            continue
        if source not in layers:
            raise ConfigError(
                f"layer {layer} reads the keys and values of layer {source}, which is in another "
                "pipeline stage; choose Parallel(stages=...) so that they are together"
            )
        layers[layer] = tuple(spec for spec in specs if isinstance(spec, IndexerSpec))


def _drafter(family: Family, reader: Reader, speculative: Speculative, *, first: int) -> Layers:
    if speculative.draft is not None:
        fields = read_fields(speculative.draft)
        # A drafter is small and runs whole on its stage; its heads are split like the model's.
        whole = replace(reader.parallel, pipeline=1, stage=0, stages=None)
        theirs = layers_of(fields, reader.storage, whole, None)
        return {
            first + layer: tuple(_mirrored(spec, speculative.tokens) for spec in specs)
            for layer, specs in theirs.items()
        }
    num_layers = speculative.layers or _mtp_layers(reader.fields)
    specs = _stored(family, family.drafts, reader, first)
    mirrored = tuple(_mirrored(spec, speculative.tokens) for spec in specs)
    return {first + layer: mirrored for layer in range(num_layers)}


def _mtp_layers(fields: Fields) -> int:
    """Layers for multi-token prediction, of whichever of its fields there is."""
    said = {name: fields.count_or_none(name) for name in _MTP_FIELDS}
    counts = {count for count in said.values() if count is not None}
    if len(counts) != 1 or counts == {0}:
        found = ", ".join(f"{name} {count}" for name, count in said.items()) or "nothing"
        raise ConfigError(
            f"{fields.where} does not say how many layers draft ({found}); pass "
            "Speculative(layers=...), or Speculative(draft=...) for a drafter of its own"
        )
    return counts.pop()


def _mirrored(spec: Spec, tokens: int) -> DraftSpec:
    match spec:
        case FullSpec() | LatentSpec() | IndexerSpec():
            return DraftSpec(spec, tokens)
        case WindowSpec():
            return DraftSpec(spec.without_window(), tokens)
        case StateSpec() | CompressedSpec() | DraftSpec():
            raise ConfigError(
                f"a drafter's layer keeps a {type(spec).__name__}; drafters of attention only are "
                "known: build the layout with Layout.from_layers"
            )


_KV_DTYPES = (*WIDE, "float8_e4m3fn", "float8_e5m2", *SCALED_DTYPES, INLINE_SCALES)
