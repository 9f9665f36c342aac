"""What recurrent layers store: the shapes in which transformers keeps them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

from kvtide.layout.buffer import INLINE_SCALES, Buffer
from kvtide.layout.dtypes import FLOATS, plain_dtype
from kvtide.layout.spec import CompressedSpec, Spec, StateSpec, WindowSpec
from kvtide.types import align_up, ceil_div

if TYPE_CHECKING:
    from kvtide.layout.reader import Reader


class _Entry(TypedDict):
    """Size and dtype of one key of DeepSeek-V4."""

    dim: int
    dtype: str


def _state(reader: Reader, *buffers: Buffer) -> StateSpec:
    return StateSpec(buffers=buffers, interval_tokens=reader.storage.interval_tokens)


def _recurrent(reader: Reader, shape: tuple[int, ...], default: str = "float32") -> Buffer:
    return Buffer("recurrent", shape, reader.storage.recurrent or _said(reader) or default)


def _said(reader: Reader) -> str | None:
    """The dtype of recurrent states that the configuration names."""
    for name in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        said = reader.fields.text_or_none(name)
        if said is not None:
            dtype = plain_dtype(said)
            if dtype not in FLOATS:
                raise reader.fields.unknown(name, said, ", ".join(FLOATS))
            return dtype
    return None


def gated_delta_net(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """Qwen3-Next, 3.5 and 4: inputs of the convolution, a key x value matrix per value head."""
    fields, split = reader.fields, reader.parallel.split
    key_heads = split("linear_num_key_heads", fields.size("linear_num_key_heads"))
    value_heads = split("linear_num_value_heads", fields.size("linear_num_value_heads"))
    key_dim, value_dim = fields.size("linear_key_head_dim"), fields.size("linear_value_head_dim")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return (
        _state(
            reader,
            _conv(reader, channels, fields.size("linear_conv_kernel_dim")),
            _recurrent(reader, (value_heads, key_dim, value_dim)),
            *_ngram_states(reader, layer),
        ),
    )


def _ngram_states(reader: Reader, layer: int) -> tuple[Buffer, ...]:
    """Qwen4's layers that look up n-grams: a dilated convolution's inputs, the last token ids."""
    fields = reader.fields
    if layer + 1 not in (fields.listed("ple_layer_ids") or ()):
        return ()
    ngram = fields.size("ngram_size")
    inputs = (fields.size("ple_conv_kernel_size") - 1) * ngram
    channels = fields.size("hc_count") * fields.size("hidden_size")
    return (
        Buffer("conv_1", (channels, inputs), reader.activation),
        Buffer("conv_2", (ngram - 1,), "int64"),
    )


def kimi_delta_attention(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """Kimi-Linear and GLM-5.3: one convolution over queries, keys and values, a matrix a head."""
    fields = reader.fields
    inner = fields.inner("linear_attn_config") or fields
    heads = inner.size_or_none("num_heads") or fields.size("linear_num_heads")
    dim = inner.size_or_none("head_dim") if inner is not fields else None
    dim = dim or fields.size("linear_head_dim")
    kernel = inner.size_or_none("short_conv_kernel_size") or fields.size("linear_conv_kernel_dim")
    local = reader.parallel.split("linear_num_heads", heads)
    return (
        _state(
            reader,
            _conv(reader, 3 * local * dim, kernel),
            _recurrent(reader, (local, dim, dim)),
        ),
    )


def mamba2(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """Nemotron-H: inputs of the convolution over values, keys and queries, a state per head."""
    fields, parallel = reader.fields, reader.parallel
    heads = parallel.split("mamba_num_heads", fields.size("mamba_num_heads"))
    groups = parallel.shard("n_groups", fields.size("n_groups"))
    head_dim, size = fields.size("mamba_head_dim"), fields.size("ssm_state_size")
    channels = heads * head_dim + 2 * groups * size
    return (
        _state(
            reader,
            _conv(reader, channels, fields.size("conv_kernel")),
            _recurrent(reader, (heads, head_dim, size)),
        ),
    )


def lightning_attention(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """MiniMax-01 and M1: a key x value matrix per head, in what the model computes in."""
    dim = reader.head_dim()
    shape = (reader.query_heads(), dim, dim)
    return (_state(reader, _recurrent(reader, shape, reader.activation)),)


def short_convolution(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """LFM2: the last inputs of a convolution over the hidden state."""
    hidden = reader.fields.size("hidden_size")
    channels = reader.parallel.split("hidden_size", hidden)
    return (_state(reader, _conv(reader, channels, reader.fields.size("conv_L_cache"))),)


def _conv(reader: Reader, channels: int, kernel: int) -> Buffer:
    return Buffer("conv", (channels, kernel), reader.activation)


def folded(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """DeepSeek-V4, heavily compressed: a window, entries of many tokens, tokens not folded yet."""
    ratio, dim = _ratio(reader, "heavily_compressed_attention", 128), _v4_dim(reader)
    return (
        *v4_window(reader, layer),
        CompressedSpec(ratio=ratio, **_entry(reader)),
        _state(reader, *_waiting(reader, "compressor", ratio - 1, dim)),
    )


def folded_indexed(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """DeepSeek-V4, compressed sparse: a window, entries of few tokens and index keys for them,
    and what the next entry of either still needs: its tokens so far and the last entry's."""
    ratio, dim = _ratio(reader, "compressed_sparse_attention", 4), _v4_dim(reader)
    index_dim = reader.fields.size("index_head_dim")
    return (
        *v4_window(reader, layer),
        CompressedSpec(ratio=ratio, **_entry(reader)),
        reader.lightning_index(ratio=ratio),
        _state(
            reader,
            *_waiting(reader, "compressor", ratio - 1, 2 * dim),
            *_overlapping(reader, "overlap", ratio, dim),
            *_waiting(reader, "indexer", ratio - 1, 2 * index_dim),
            *_overlapping(reader, "indexer_overlap", ratio, index_dim),
        ),
    )


def pool_begun(reader: Reader, pool: int, width: int) -> tuple[Spec, ...]:
    """GLM-5.3: keys and gates of the tokens that do not fill a pool yet; nothing if one does."""
    return (_state(reader, *_waiting(reader, "indexer", pool - 1, width)),) if pool > 1 else ()


def v4_window(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """The window of every DeepSeek-V4 layer: one head whose keys are its values."""
    entry, window = _entry(reader), reader.fields.size("sliding_window")
    return (
        WindowSpec(
            window=window, kv_heads=1, head_dim=entry["dim"], dtype=entry["dtype"], is_tied=True
        ),
    )


def _entry(reader: Reader) -> _Entry:
    """Elements and dtype of one DeepSeek-V4 key, which is its value too.

    With scales inside, as FlashMLA reads them: a float8 per element without a position, the rotary
    part in bfloat16, an exponent byte per 64 elements, rounded up to 8 bytes: 584 for 448 + 64.
    """
    dim = _v4_dim(reader)
    if reader.storage.kv != INLINE_SCALES:
        return {"dim": dim, "dtype": reader.storage.kv}
    rope = reader.fields.size("qk_rope_head_dim")
    if rope >= dim:
        raise reader.fields.unknown("qk_rope_head_dim", rope, f"less than head_dim = {dim}")
    scales = ceil_div(dim - rope, 64)
    return {"dim": align_up(dim - rope + 2 * rope + scales, 8), "dtype": "uint8"}


def _v4_dim(reader: Reader) -> int:
    reader.query_heads()
    return reader.fields.size("head_dim")


def _ratio(reader: Reader, kind: str, published: int) -> int:
    """Tokens an entry folds: `compress_rates`, or what `compress_ratios` says, which is these."""
    rates = reader.fields.inner("compress_rates")
    return published if rates is None else rates.size(kind)


def _waiting(reader: Reader, name: str, tokens: int, width: int) -> tuple[Buffer, Buffer]:
    """Values and gates of tokens that an entry to come is made of.

    Serving kernels keep them in float32, transformers in what it computes in.
    """
    wide = "float32" if reader.is_kernels else reader.activation
    dtype = reader.storage.recurrent or wide
    return tuple(  # pyright: ignore[reportReturnType]
        Buffer(f"{name}_{part}", (tokens, width), dtype) for part in ("kv", "gate")
    )


def _overlapping(reader: Reader, name: str, tokens: int, width: int) -> tuple[Buffer, Buffer]:
    """As `_waiting`, of tokens already folded once: their gates have a bias, which is float32."""
    values, gates = _waiting(reader, name, tokens, width)
    wide = "float64" if gates.dtype == "float64" else "float32"
    return values, replace(gates, dtype=wide)
