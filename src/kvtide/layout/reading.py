"""The fields of a configuration -> what every layer of one rank stores."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from kvtide.errors import ConfigError
from kvtide.layout.buffer import INLINE_SCALES
from kvtide.layout.dtypes import FLOATS, KV_DTYPES, WIDE, plain_dtype
from kvtide.layout.families import FAMILIES, Family
from kvtide.layout.kinds import HYBRID_LETTERS, LAYER_TYPES
from kvtide.layout.reader import FP4_INDEX, FP8_INDEX, Reader, Storage
from kvtide.layout.source import read_fields
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
    from kvtide.layout.fields import Fields
    from kvtide.layout.kinds import Kind
    from kvtide.layout.parallel import Parallel, Speculative

    Layers = dict[int, tuple[Spec, ...]]

DEFAULT_STATE_INTERVAL = 1024
"""Tokens between the last places in a prompt where a recurrent state may be kept for reuse, about.
"""

MAX_LAYERS = 10_000
"""No model has more; what says so is broken."""

_MTP_FIELDS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")


def require_kind(name: str, given: object, kind: type) -> None:
    """Raise ConfigError unless the argument `name` is None or of this kind."""
    if given is not None and not isinstance(given, kind):
        raise ConfigError(f"{name} is {given!r}; pass a {kind.__name__}")


def family_of(fields: Fields) -> Family:
    """The family of a configuration; ConfigError if its `model_type` is not one we know."""
    name = fields.text_or_none("model_type")
    if name is None:
        raise fields.missing("model_type")
    if name not in FAMILIES:
        near = ", ".join(get_close_matches(name, FAMILIES, n=4)) or "none"
        raise ConfigError(
            f"model_type is {name!r}, which is not among the {len(FAMILIES)} types that layouts "
            f"are known for (near it: {near}; all in kvtide.layout.families.FAMILIES). Build the "
            "layout of other models with Layout.from_layers, naming what each layer caches"
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
    said = None if said in (None, "auto") else plain_dtype(said)
    kv = said if kv_dtype in (None, "auto") else plain_dtype(kv_dtype)
    if kv is None:
        raise ConfigError(
            f"{fields.where} has no dtype; pass kv_dtype, one of {', '.join(KV_DTYPES)}"
        )
    if kv not in KV_DTYPES:
        field = "dtype" if kv_dtype in (None, "auto") else "kv_dtype"
        raise ConfigError(f"{field} is {kv!r}; use a kv_dtype of {', '.join(KV_DTYPES)}")
    # Convolution inputs are kept as computed, whatever the keys and values are squeezed into.
    activation = said if said in WIDE else kv if kv in WIDE else None
    default = block_tokens * max(1, DEFAULT_STATE_INTERVAL // block_tokens)
    return Storage(
        kv=kv,
        index=_chosen("index_dtype", index_dtype, (FP8_INDEX, FP4_INDEX, *FLOATS)),
        activation=activation,
        recurrent=_chosen("state_dtype", state_dtype, FLOATS),
        interval_tokens=default if state_interval is None else state_interval,
    )


def _chosen(name: str, given: str | None, known: tuple[str, ...]) -> str | None:
    """A dtype given under `name`, by its torch name, if it is one of `known`."""
    if given is None:
        return None
    dtype = given if given in known else plain_dtype(given)
    if dtype not in known:
        raise ConfigError(f"{name} is {given!r}; use one of {', '.join(known)}")
    return dtype


def layers_of(
    fields: Fields, storage: Storage, parallel: Parallel, speculative: Speculative | None
) -> Layers:
    """What every layer of this rank's stage caches, and the drafter's after the last of them."""
    family = family_of(fields)
    reader = Reader(
        fields=fields,
        storage=storage,
        parallel=parallel,
        divides=family.divides,
        pairs=family.pairs,
    )
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
    num_layers = said or listed or 0
    if num_layers > MAX_LAYERS:
        raise ConfigError(
            f"num_hidden_layers of {fields.where} is {num_layers:,}; no model has more than "
            f"{MAX_LAYERS:,}"
        )
    _check_layers(fields, num_layers)
    return family.kinds(fields, num_layers)


def _check_layers(fields: Fields, num_layers: int) -> None:
    """Refuse `per_layer_config` of layers there are not."""
    own = fields.inner("per_layer_config")
    for key in () if own is None else own.values:
        if not (own and key.isdecimal() and int(key) < num_layers and own.inner(key)):
            raise ConfigError(
                f"per_layer_config of {fields.where} has an entry {key!r}; it maps layers 0 to "
                f"{num_layers - 1} to objects"
            )


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
        return _separate_drafter(reader, speculative, first)
    num_layers = speculative.layers or _mtp_layers(reader.fields)
    specs = _stored(family, family.drafts, reader, first)
    # Tokens of an entry begun are not kept for a drafter: it runs over them again.
    kept = [spec for spec in specs if not isinstance(spec, StateSpec)]
    mirrored = tuple(_mirrored(spec, speculative.tokens) for spec in kept)
    return {first + layer: mirrored for layer in range(num_layers)}


def _separate_drafter(reader: Reader, speculative: Speculative, first: int) -> Layers:
    """A drafter that is a model of its own; small, so it runs whole on the last stage."""
    fields = read_fields(speculative.draft)
    fields.where = f"the drafter ({fields.where})"
    storage = reader.storage
    if storage.kv == INLINE_SCALES and not fields.has("kv_lora_rank"):
        storage = replace(storage, kv="float8_e4m3fn")  # that format is for latents
    whole = replace(reader.parallel, pipeline=1, stage=0, stages=None)
    theirs = layers_of(fields, storage, whole, None)
    return {
        first + layer: tuple(_mirrored(spec, speculative.tokens) for spec in specs)
        for layer, specs in theirs.items()
    }


def _mtp_layers(fields: Fields) -> int:
    """Layers for multi-token prediction, of whichever of its fields there is."""
    said = {name: fields.count(name) for name in _MTP_FIELDS if fields.has(name)}
    shown = ", ".join(f"{name} {count}" for name, count in said.items())
    cure = "pass Speculative(layers=...), or Speculative(draft=...) for a drafter of its own"
    if not said:
        raise ConfigError(f"{fields.where} does not say how many layers draft; {cure}")
    if len(set(said.values())) > 1:
        raise ConfigError(f"{fields.where} says of layers that draft: {shown}; {cure}")
    count = max(said.values())
    if not 0 < count <= MAX_LAYERS:
        raise ConfigError(f"{fields.where} has no layers that draft ({shown}); {cure}")
    return count * _attention_per_draft(fields)


def _attention_per_draft(fields: Fields) -> int:
    """Layers of attention in one drafting layer of Nemotron-H, which has a pattern of its own."""
    pattern = fields.text_or_none("mtp_hybrid_override_pattern")
    blocks = fields.listed("mtp_layers_block_type")
    if pattern is None and blocks is None:
        return 1
    words: dict[str, Kind] = HYBRID_LETTERS if pattern is not None else LAYER_TYPES
    kinds = [words.get(str(word)) for word in (pattern or blocks or ())]
    if not set(kinds) <= {"full", "none"} or "full" not in kinds:
        raise fields.unknown(
            "mtp_hybrid_override_pattern" if pattern is not None else "mtp_layers_block_type",
            pattern or blocks,
            "patterns of full attention and layers without any",
        )
    return kinds.count("full")


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
