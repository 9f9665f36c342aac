"""What the layers of particular families store, and whose keys and values they read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from kvtide.errors import ConfigError
from kvtide.layout import kinds as rule
from kvtide.layout import reader as attention
from kvtide.layout import states
from kvtide.layout.fields import Fields
from kvtide.layout.spec import Spec, WindowSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide.layout.kinds import Kind
    from kvtide.layout.reader import Reader


def indexed_latent(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """DeepSeek-V3.2, GLM-5: latents, and index keys where the layer has an indexer of its own."""
    num_layers = reader.fields.size("num_hidden_layers")
    if not rule.owns_indexer(reader.fields, layer, num_layers):
        return (reader.latent(),)
    return reader.latent(), reader.lightning_index()


def mistral_large(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """Mistral-Large-4: as GLM-5; every so many layers have no rotary key."""
    num_layers = reader.fields.size("num_hidden_layers")
    ropes = rule.rope_layers(reader.fields, num_layers)
    latents = reader.latent(has_rope=layer >= num_layers or ropes[layer])
    if not rule.owns_indexer(reader.fields, layer, num_layers):
        return (latents,)
    return latents, reader.lightning_index()


def pooled_index(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """GLM-5.3: latents, and index keys pooled over `index_kpool` tokens.

    As serving kernels keep them: a key per pool, and the tokens of the pool begun as a state. With
    an index dtype that is not theirs, as transformers does: of every token a key, a gate and
    whether it is there, pooled anew in every forward.
    """
    if not rule.owns_indexer(reader.fields, layer, reader.fields.size("num_hidden_layers")):
        return (reader.latent(),)
    dim = reader.fields.size("index_head_dim")
    if not reader.is_kernels:
        return reader.latent(), reader.plain_index(2 * dim + 1)
    pool = reader.fields.size("index_kpool")
    keys = reader.lightning_index(ratio=pool)
    return (reader.latent(), keys, *states.pool_begun(reader, pool, dim))


def block_sparse(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """MiniMax-M3: keys and values of heads, and one head of index keys."""
    sparse = reader.fields.inner("sparse_attention_config")
    dim = sparse.size("sparse_index_dim") if sparse else reader.fields.size("index_head_dim")
    return reader.full(), reader.plain_index(dim)


def query_sparse(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """Qwen4: keys and values of heads, and index keys."""
    fields = reader.fields
    dim = fields.size("indexer_kv_heads") * fields.size("indexer_head_dim")
    return reader.full(), reader.plain_index(dim)


def gemma4_full(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """Gemma 4: full layers have heads of their own size, and of their own number if K = V."""
    fields = reader.fields
    if fields.has("per_layer_config"):
        return attention.full(reader, layer)
    changed = fields.with_values(head_dim=fields.size("global_head_dim"))
    heads = fields.size_or_none("num_global_key_value_heads")
    if heads is not None and fields.flag("attention_k_eq_v", default=False):
        changed = changed.with_values(num_key_value_heads=heads)
    return (replace(reader, fields=changed).full(),)


def searched(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """Nemotron NAS: every layer says itself how many heads share a key, or that it is none."""
    said = _own_block(reader.fields, layer)
    if said.flag("no_op", default=False) or said.flag("replace_with_linear", default=False):
        return ()
    for odd in ("sparsify", "num_sink_tokens"):
        if said.has(odd):
            raise said.unknown(odd, said.values[odd], "null")
    heads, sharing = reader.fields.size("num_attention_heads"), said.size("n_heads_in_group")
    if heads % sharing:
        raise said.unknown("n_heads_in_group", sharing, f"what divides {heads} heads")
    fields = reader.fields.with_values(num_key_value_heads=heads // sharing)
    full = replace(reader, fields=fields).full()
    window = said.size_or_none("window_length")
    if window is None or said.flag("use_prefill_window_attention", default=False):
        return (full,)
    return (
        WindowSpec(window=window, kv_heads=full.kv_heads, head_dim=full.head_dim, dtype=full.dtype),
    )


def _own_block(fields: Fields, layer: int) -> Fields:
    """What `block_configs` says of the attention of one layer."""
    blocks = fields.per_layer("block_configs", fields.size("num_hidden_layers"))
    if blocks is None:
        raise fields.missing("block_configs")
    if layer >= len(blocks):
        raise ConfigError(
            f"{fields.where} has no layers of its own that draft; pass Speculative(draft=...)"
        )
    block = blocks[layer]
    if not isinstance(block, dict):
        raise fields.unknown("block_configs", block, "objects")
    values = cast("dict[str, object]", block)
    own = Fields(values, f"block_configs[{layer}] of {fields.where}").inner("attention")
    if own is None:
        raise fields.missing(f"block_configs[{layer}].attention")
    return own


def last_of_type(*, must_say: bool) -> Callable[[Fields, list[Kind]], list[int]]:
    """Gemma 3n and 4: the last `num_kv_shared_layers` read the last earlier layer of their type."""

    def sources(fields: Fields, kinds: list[Kind]) -> list[int]:
        shared = fields.count_or_none("num_kv_shared_layers")
        if shared is None and must_say:
            raise fields.missing("num_kv_shared_layers")
        first = len(kinds) - (shared or 0)
        if not 0 < first <= len(kinds):
            raise ConfigError(
                f"num_kv_shared_layers of {fields.where} is {shared} of {len(kinds)} layers; "
                "at least one must have keys and values of its own"
            )
        last = {kind: layer for layer, kind in enumerate(kinds[:first])}
        for layer in range(first, len(kinds)):
            if kinds[layer] not in last:
                raise ConfigError(
                    f"layer {layer} of {fields.where} shares keys and values, but no layer of its "
                    f"type ({kinds[layer]}) before layer {first} has any; check layer_types"
                )
        return [*range(first), *(last[kind] for kind in kinds[first:])]

    return sources


def source_layers(fields: Fields, kinds: list[Kind]) -> list[int]:
    """Mistral-Large-4: `kv_source_layers` says it for every layer."""
    given = fields.per_layer("kv_source_layers", len(kinds))
    if given is None:
        return list(range(len(kinds)))
    for layer, source in enumerate(given):
        if type(source) is not int or not 0 <= source <= layer or given[source] != source:
            raise fields.unknown(
                "kv_source_layers", source, f"layers up to {layer} that are their own source"
            )
    return cast("list[int]", given)
