"""Which kind of attention every layer has, from the many ways in which configurations say so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtide.layout.fields import Fields

_T = TypeVar("_T")

Kind: TypeAlias = Literal[
    "full",  # keys and values of every token
    "sliding",  # ... of the last `sliding_window`
    "chunked",  # ... of the current `attention_chunk_size`
    "indexed",  # every token, of which an indexer picks some
    "linear",  # a recurrent state
    "conv",  # a short convolution
    "folded_indexed",  # a window, and every few tokens folded into an entry that an indexer picks
    "folded",  # a window, and every many tokens folded into an entry
    "none",  # nothing
]

LAYER_TYPES: dict[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "indexed_attention": "indexed",
    "minimax_m3_sparse": "indexed",
    "linear_attention": "linear",
    "mamba": "linear",
    "conv": "conv",
    "compressed_sparse_attention": "folded_indexed",
    "heavily_compressed_attention": "folded",
    "moe": "none",
    "mlp": "none",
    "dummy": "none",
}
"""The words of `layer_types`."""

HYBRID_LETTERS: dict[str, Kind] = {"M": "linear", "*": "full", "-": "none", "E": "none"}
"""The letters of Nemotron-H's `hybrid_override_pattern`."""


def layer_types(fields: Fields, num_layers: int) -> list[Kind] | None:
    """The kinds that `layer_types` or `layers_block_type` spells out, None if neither is there."""
    for name in ("layer_types", "layers_block_type"):
        given = fields.per_layer(name, num_layers)
        if given is not None:
            return [_known(fields, name, kind, LAYER_TYPES) for kind in given]
    return None


def from_window(
    unsaid: int | Literal["all"] | None, *, windowed: bool = False
) -> Callable[[Fields, int], list[Kind]]:
    """Rule for models of full and sliding attention that may not list their layers' types.

    Where a window is set but no pattern is: `unsaid` n makes every n-th layer full, "all" makes
    all of them slide, None refuses. `windowed` families slide by default: an absent
    `sliding_window` says nothing there, only null says that there is none.
    """

    def kinds(fields: Fields, num_layers: int) -> list[Kind]:
        listed = layer_types(fields, num_layers)
        if listed is not None:
            return listed
        if windowed and not fields.says("sliding_window"):
            raise fields.missing("layer_types", "sliding_window")
        if fields.has("attention_chunk_size") or fields.flag("use_sliding_window", default=False):
            raise fields.missing("layer_types")
        if fields.size_or_none("sliding_window") is None or fields.has("use_sliding_window"):
            return ["full"] * num_layers
        period = fields.size_or_none("sliding_window_pattern", "_sliding_window_pattern") or unsaid
        if period is None:
            raise ConfigError(
                f"sliding_window of {fields.where} is {fields.values['sliding_window']}, but it "
                "does not say which layers slide; add layer_types"
            )
        if period == "all":
            return ["sliding"] * num_layers
        return ["full" if (layer + 1) % period == 0 else "sliding" for layer in range(num_layers)]

    return kinds


def last_is_full(base: Callable[[Fields, int], list[Kind]]) -> Callable[[Fields, int], list[Kind]]:
    """Rule for Gemma 4: as `base`, but its class makes the last layer full whatever is listed."""
    return lambda fields, num_layers: [*base(fields, num_layers)[:-1], "full"]


def qwen(slides: Callable[[Fields, int], bool] | None) -> Callable[[Fields, int], list[Kind]]:
    """Rule for Qwen 2 and 3, whose windows are off unless `use_sliding_window` is true.

    `slides(fields, layer)` says whether a layer does then; None refuses.
    """

    def kinds(fields: Fields, num_layers: int) -> list[Kind]:
        listed = layer_types(fields, num_layers)
        if listed is not None:
            return listed
        if fields.has("sliding_window") and not fields.says("use_sliding_window"):
            raise fields.missing("use_sliding_window", "layer_types")
        if not fields.flag("use_sliding_window", default=False):
            return ["full"] * num_layers
        if slides is None or not fields.says("sliding_window"):
            raise fields.missing("layer_types" if slides is None else "sliding_window")
        if not fields.has("sliding_window"):
            return ["full"] * num_layers
        return ["sliding" if slides(fields, layer) else "full" for layer in range(num_layers)]

    return kinds


def late(fields: Fields, layer: int) -> bool:
    """Qwen 2 and 3: layers from `max_window_layers` on slide."""
    return layer >= fields.count("max_window_layers")


def early_every_other(fields: Fields, layer: int) -> bool:
    """Qwen 2 MoE: every other layer below `max_window_layers` slides, the first one too."""
    return layer % 2 == 0 and layer < fields.count("max_window_layers")


def llama4(fields: Fields, num_layers: int) -> list[Kind]:
    """Llama 4: layers with rotary keys (1 in `no_rope_layers`) are chunked, the others full."""
    listed = layer_types(fields, num_layers)
    if listed is not None:
        return listed
    if not fields.says("attention_chunk_size"):
        raise fields.missing("layer_types", "attention_chunk_size")
    ropes = rope_layers(fields, num_layers)
    chunked = fields.has("attention_chunk_size")
    return ["chunked" if rope and chunked else "full" for rope in ropes]


def rope_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Which layers have rotary keys: `no_rope_layers` (1: it has), else all but every
    `no_rope_layer_interval`-th (4)."""
    if fields.listed("no_rope_layers"):
        given = fields.per_layer("no_rope_layers", num_layers) or []
        words: dict[object, bool] = {0: False, 1: True}
        return [_known(fields, "no_rope_layers", word, words) for word in given]
    period = fields.size_or_none("no_rope_layer_interval") or 4
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def lfm2(fields: Fields, num_layers: int) -> list[Kind]:
    """LFM2: `layer_types`, or the layers of full attention in `full_attn_idxs`."""
    listed = layer_types(fields, num_layers)
    full = fields.listed("full_attn_idxs")
    if listed is not None:
        return listed
    if full is None:
        raise fields.missing("layer_types", "full_attn_idxs")
    kinds: list[Kind] = ["full" if i in full else "conv" for i in range(num_layers)]
    return kinds


def every(kind: Kind) -> Callable[[Fields, int], list[Kind]]:
    """Rule for models whose layers are all of one kind, whatever `layer_types` calls it."""

    def kinds(fields: Fields, num_layers: int) -> list[Kind]:
        listed = layer_types(fields, num_layers)
        if listed is not None and not set(listed) <= {kind, "full"}:
            raise fields.unknown("layer_types", sorted(set(listed)), f"{kind} for this model")
        return [kind] * num_layers

    return kinds


def at_intervals(other: Kind, attention: Kind) -> Callable[[Fields, int], list[Kind]]:
    """Rule for hybrids: every `full_attention_interval`-th layer attends, the rest is `other`."""

    def kinds(fields: Fields, num_layers: int) -> list[Kind]:
        listed = layer_types(fields, num_layers)
        if listed is not None:
            return [attention if kind == "full" else kind for kind in listed]
        period = fields.size("full_attention_interval")
        return [attention if (i + 1) % period == 0 else other for i in range(num_layers)]

    return kinds


def delta_attention(attention: Kind) -> Callable[[Fields, int], list[Kind]]:
    """Rule for Kimi-Linear and GLM-5.3: `layer_types`, or `linear_attn_config`, which counts from
    1; layers that are not linear are `attention`."""

    def kinds(fields: Fields, num_layers: int) -> list[Kind]:
        inner = fields.inner("linear_attn_config")
        full = None if inner is None else inner.listed("full_attn_layers")
        linear = None if inner is None else inner.listed("kda_layers")
        if full is not None and linear is not None:
            named = [*full, *linear]
            if not all(type(layer) is int for layer in named) or sorted(map(str, named)) != sorted(
                map(str, range(1, num_layers + 1))
            ):
                raise ConfigError(
                    f"full_attn_layers and kda_layers of {fields.where} name {len(full)} and "
                    f"{len(linear)} layers; together they must name each of 1 to {num_layers} once"
                )
            return [attention if i + 1 in full else "linear" for i in range(num_layers)]
        listed = layer_types(fields, num_layers)
        if listed is None:
            raise fields.missing("layer_types", "linear_attn_config")
        return [attention if kind == "full" else kind for kind in listed]

    return kinds


def minimax(fields: Fields, num_layers: int) -> list[Kind]:
    """MiniMax: `attn_type_list` (0 lightning, 1 full), `sparse_attention_freq`, or types."""
    if fields.has("sliding_window"):
        raise fields.unknown("sliding_window", fields.values["sliding_window"], "null")
    sparse = fields.inner("sparse_attention_config")
    if sparse is not None and sparse.flag("use_sparse_attention", default=True):
        switches = sparse.per_layer("sparse_attention_freq", num_layers)
        if switches is None:
            raise sparse.missing("sparse_attention_freq")
        words: dict[object, Kind] = {0: "full", 1: "indexed"}
        return [_known(sparse, "sparse_attention_freq", switch, words) for switch in switches]
    listed = layer_types(fields, num_layers)
    switches = fields.per_layer("attn_type_list", num_layers)
    if listed is None and switches is not None:
        kinds: dict[object, Kind] = {0: "linear", 1: "full"}
        return [_known(fields, "attn_type_list", switch, kinds) for switch in switches]
    return listed or ["full"] * num_layers


def lightning(fields: Fields, num_layers: int) -> list[Kind]:
    """MiniMax-01 and M1: as `minimax`, but never guessed to be full."""
    if not fields.has("layer_types") and not fields.has("attn_type_list"):
        raise fields.missing("layer_types", "attn_type_list")
    return minimax(fields, num_layers)


def nemotron_h(fields: Fields, num_layers: int) -> list[Kind]:
    """Nemotron-H: a letter for every layer, or its type."""
    pattern = fields.text_or_none("hybrid_override_pattern")
    if pattern is None:
        listed = layer_types(fields, num_layers)
        if listed is None:
            raise fields.missing("layers_block_type", "hybrid_override_pattern")
        return listed
    return [_known(fields, "hybrid_override_pattern", c, HYBRID_LETTERS) for c in pattern]


def deepseek_v4(fields: Fields, num_layers: int) -> list[Kind]:
    """DeepSeek-V4: `layer_types`, or a ratio for every layer (and after them those that draft)."""
    listed = layer_types(fields, num_layers)
    ratios = fields.listed("compress_ratios")
    if ratios is None:
        if listed is None:
            raise fields.missing("layer_types", "compress_ratios")
        return listed
    drafting = fields.count_or_none("num_nextn_predict_layers") or 0
    if not num_layers <= len(ratios) <= num_layers + drafting:
        raise ConfigError(
            f"compress_ratios of {fields.where} has {len(ratios)} entries for {num_layers} layers "
            f"and {drafting} that draft; it must have one for each"
        )
    words: dict[object, Kind] = {0: "sliding", 4: "folded_indexed", 128: "folded"}
    folds = ratios[:num_layers]
    kinds: list[Kind] = [_known(fields, "compress_ratios", ratio, words) for ratio in folds]
    if listed is not None and listed != kinds:
        raise ConfigError(
            f"layer_types and compress_ratios of {fields.where} contradict each other; drop one"
        )
    return kinds


def owns_indexer(fields: Fields, layer: int, num_layers: int) -> bool:
    """Whether a layer has an indexer of its own, or uses what an earlier layer's picked.

    `indexer_types`, else `index_topk_pattern` ("F" and "S"), else every `index_topk_freq`-th layer
    after the first `index_skip_topk_offset` - 1, else all (GLM-5.2's rule in transformers). Layers
    that draft come after the others and have one.
    """
    if layer >= num_layers:
        return True
    for name in ("indexer_types", "index_topk_pattern"):
        value = fields.values.get(name)
        given = list(value) if isinstance(value, str) else fields.listed(name)
        if given is not None:
            if len(given) != num_layers:
                raise ConfigError(
                    f"{name} of {fields.where} has {len(given)} entries for {num_layers} layers; "
                    "it must have one for each"
                )
            words: dict[object, bool] = {"full": True, "shared": False, "F": True, "S": False}
            return _known(fields, name, given[layer], words)
    period = fields.size_or_none("index_topk_freq") or 1
    offset = fields.count_or_none("index_skip_topk_offset")
    skipped = 1 if offset is None else offset - 1
    return max(layer - skipped, 0) % period == 0


def _known(fields: Fields, name: str, word: object, words: Mapping[Any, _T]) -> _T:
    for known, meaning in words.items():
        if known == word and type(known) is type(word):
            return meaning
    raise fields.unknown(name, word, ", ".join(map(str, words)))
