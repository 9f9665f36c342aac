"""One configuration being read for one rank, and what its attention layers store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtide.errors import ConfigError
from kvtide.layout.buffer import INLINE_SCALES
from kvtide.layout.spec import FullSpec, IndexerSpec, LatentSpec, Spec, WindowSpec

if TYPE_CHECKING:
    from kvtide.layout.fields import Fields
    from kvtide.layout.parallel import Parallel

FP8_INDEX = "fp8"
"""Index keys as DeepSeek's indexer kernels read them: a float8 each, a float32 scale per 128."""
FP4_INDEX = "fp4"
"""... two to a byte, an exponent byte per 32."""
INDEX_FORMATS = (None, FP8_INDEX, FP4_INDEX)
"""Index dtypes of those kernels; None leaves the choice to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Dtypes of what is stored, and how often a state may be kept.

    `kv` of keys, values and latents; `index` of indexer keys (None: as the family's kernels have
    them); `activation` what the model computes in, which convolution inputs keep (None: nobody
    said); `recurrent` of recurrent states (None: as the family says).
    """

    kv: str
    index: str | None
    activation: str | None
    recurrent: str | None
    interval_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """The fields of a configuration, how it is stored and how it is spread.

    Where a size is absent, computing it is no guess if the family's own code does: `divides` the
    hidden size among the heads for `head_dim`, takes as many key-value heads as heads (`pairs`).
    """

    fields: Fields
    storage: Storage
    parallel: Parallel
    divides: bool
    pairs: bool

    def at(self, layer: int) -> Reader:
        """The same for one layer, which may have sizes of its own."""
        return replace(self, fields=self.fields.at(layer))

    @property
    def activation(self) -> str:
        """What the model computes in; ConfigError if neither its fields nor kv_dtype say it."""
        if self.storage.activation is None:
            raise self.fields.missing("dtype")
        return self.storage.activation

    @property
    def is_kernels(self) -> bool:
        """Whether sparse attention is stored as its serving kernels read it, not as transformers
        computes it, which a plain index dtype asks for."""
        return self.storage.index in INDEX_FORMATS

    def full(self) -> FullSpec:
        """Keys and values of every token."""
        kv_heads, head_dim = self._heads()
        return FullSpec(kv_heads=kv_heads, head_dim=head_dim, dtype=self._kv_dtype())

    def window(self, field: str = "sliding_window") -> WindowSpec:
        """Keys and values of the last tokens, as many as `field` says.

        A chunk of `attention_chunk_size` tokens is kept as a window of that many: it never reads
        further back.
        """
        kv_heads, head_dim = self._heads()
        return WindowSpec(
            window=self.fields.size(field),
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=self._kv_dtype(),
        )

    def latent(self, *, has_rope: bool = True) -> LatentSpec:
        """Latents, which every head reads: ranks that split the heads each hold all of them."""
        self.query_heads()
        if not self.fields.flag("use_mla", default=True):
            raise self.fields.unknown("use_mla", "false", "true")
        return LatentSpec(
            rank=self.fields.size("kv_lora_rank"),
            rope_dim=self.fields.count("qk_rope_head_dim") if has_rope else 0,
            dtype=self.storage.kv,
        )

    def lightning_index(self, *, ratio: int = 1) -> IndexerSpec:
        """Index keys of DeepSeek's lightning indexer, one head of them, fp8 unless told."""
        dim = self.fields.size("index_head_dim")
        return self._index(dim, self.storage.index or FP8_INDEX, ratio)

    def plain_index(self, dim: int) -> IndexerSpec:
        """Index keys of other indexers, as the model computes them unless told."""
        return self._index(dim, self.storage.index or self.activation, 1)

    def query_heads(self) -> int:
        """Query heads on this rank."""
        heads = self.fields.size("num_attention_heads")
        return self.parallel.split("num_attention_heads", heads)

    def head_dim(self) -> int:
        """Elements of a head: as said, or the hidden size divided among the heads."""
        given = self.fields.size_or_none("head_dim", "attention_head_dim")
        if given is not None:
            return given
        hidden = self.fields.size("hidden_size")
        heads = self.fields.size("num_attention_heads")
        if hidden % heads or not self.divides:
            raise self.fields.missing("head_dim")
        return hidden // heads

    def _heads(self) -> tuple[int, int]:
        """Key-value heads on this rank, and the elements of each."""
        heads = self.fields.size("num_attention_heads")
        kv_heads = self.fields.size_or_none("num_key_value_heads")
        if kv_heads is None and not (self.pairs or self.fields.says("num_key_value_heads")):
            raise self.fields.missing("num_key_value_heads")
        kv_heads = kv_heads or heads
        if heads % kv_heads:
            raise ConfigError(
                f"num_key_value_heads of {self.fields.where} is {kv_heads} and "
                f"num_attention_heads {heads}; every key-value head must serve equally many"
            )
        self.query_heads()
        return self.parallel.shard("num_key_value_heads", kv_heads), self.head_dim()

    def _kv_dtype(self) -> str:
        if self.storage.kv == INLINE_SCALES:
            raise ConfigError(
                f"kv_dtype is {INLINE_SCALES!r}, which is for latents; {self.fields.where} caches "
                "keys and values of heads: use float8_e4m3fn, int8, int4 or nvfp4"
            )
        return self.storage.kv

    def _index(self, dim: int, dtype: str, ratio: int) -> IndexerSpec:
        match dtype:
            case "fp8":
                scales = 4 * -(-dim // 128)
                return IndexerSpec(dim=dim, dtype="float8_e4m3fn", scale_bytes=scales, ratio=ratio)
            case "fp4":
                if dim % 32:
                    raise ConfigError(
                        f"index keys of {self.fields.where} have {dim} elements, and index_dtype "
                        "fp4 scales 32 together; use fp8"
                    )
                return IndexerSpec(dim=dim // 2, dtype="uint8", scale_bytes=dim // 32, ratio=ratio)
            case _:
                return IndexerSpec(dim=dim, dtype=dtype, ratio=ratio)


def full(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """A layer of full attention over keys and values of heads."""
    return (reader.at(layer).full(),)


def sliding(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """A layer of sliding-window attention."""
    return (reader.at(layer).window(),)


def chunked(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """A layer of chunked local attention."""
    return (reader.at(layer).window("attention_chunk_size"),)


def latent(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """A layer of multi-head latent attention."""
    return (reader.at(layer).latent(),)


def nothing(reader: Reader, layer: int) -> tuple[Spec, ...]:
    """A layer without attention."""
    return ()
