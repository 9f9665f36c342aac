"""What a model costs to run: parameters and their bytes, and attention per layer group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtide.errors import ConfigError
from kvtide.layout.buffer import ITEM_BYTES
from kvtide.layout.dtypes import WIDE, plain_dtype
from kvtide.layout.lifetime import Mirror, require_positive
from kvtide.sim.costs.architecture import Architecture
from kvtide.sim.costs.feedforward import feed_forward_kind
from kvtide.sim.costs.reads import Reads, reads_of, state_cost
from kvtide.sim.costs.weights import Weights, weights_from_totals, weights_of

if TYPE_CHECKING:
    from kvtide.layout import Layout
    from kvtide.layout.fields import Fields

WEIGHT_BYTES: dict[str, float] = {
    **{dtype: float(ITEM_BYTES[dtype]) for dtype in (*WIDE, "float8_e4m3fn", "float8_e5m2")},
    "int8": 1.0,
    "int4": 0.5,
    "mxfp4": 0.5 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}
"""Bytes of a parameter, with the scale per 32 (mxfp4) or 16 (nvfp4) of them."""

_METHODS = {"fp8": "float8_e4m3fn", "mxfp4": "mxfp4"}
"""Weight dtypes of `quantization_config`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """What one of `ranks` ranks computes and reads; the ranks share every layer evenly.

    Bytes are per parameter: `dense_bytes` of attention and feed-forward, `expert_bytes` of experts,
    `head_bytes` of the head. `state_flops` and `write_bytes` are per computed token, `state_bytes`
    per row of a step. `compute_dtype` is what linear layers multiply in. Ranks that share layers
    add up their partial sums in `exchanges` all-reduces a step, and each sends `link_bytes` per
    computed token for them.
    """

    weights: Weights
    reads: tuple[Reads, ...]
    state_flops: float = 0.0
    state_bytes: float = 0.0
    write_bytes: float = 0.0
    dense_bytes: float = 2.0
    expert_bytes: float = 2.0
    head_bytes: float = 2.0
    compute_dtype: str = "bfloat16"
    ranks: int = 1
    exchanges: int = 0
    link_bytes: float = 0.0

    @classmethod
    def from_config(
        cls,
        config: object,
        layout: Layout,
        *,
        weight_dtype: str | None = None,
        params: float | None = None,
        active_params: float | None = None,
        ranks: int = 1,
    ) -> ModelCost:
        """The costs of the model that a configuration describes, as `Layout.from_config` takes it.

        `layout` is what one of `ranks` ranks caches. `weight_dtype` is that of all linear layers
        but the head (default: what `quantization_config` says, else the configuration's dtype).
        Parameters are counted from the fields, or split from the published totals `params` and
        `active_params`. Raises ConfigError naming a field that is missing.
        """
        require_positive("ranks", ranks)
        model = Architecture.of(config)
        if params is None:
            if active_params is not None:
                raise ConfigError(f"active_params is {active_params!r} without params; pass both")
            weights = weights_of(model)
        else:
            weights = weights_from_totals(model.fields, params, active_params)
        dense, expert = _dtypes(model.fields, weight_dtype)
        state = state_cost(layout)
        written = sum(
            group.bytes_per_token or 0
            for group in layout.groups
            if not isinstance(group.lifetime, Mirror)
        )
        return cls(
            weights=weights,
            reads=reads_of(model, layout, ranks),
            state_flops=state.flops,
            state_bytes=state.row_bytes,
            write_bytes=written + state.token_bytes,
            dense_bytes=WEIGHT_BYTES[dense],
            expert_bytes=WEIGHT_BYTES[expert],
            head_bytes=WEIGHT_BYTES[_said(model.fields)],
            compute_dtype=dense if dense.startswith("float8") else "bfloat16",
            ranks=ranks,
            exchanges=_exchanges(model) if ranks > 1 else 0,
            link_bytes=_link_bytes(model, ranks),
        )

    @property
    def total_params(self) -> float:
        """Parameters of the whole model."""
        return self.weights.total

    @property
    def active_params(self) -> float:
        """Parameters of the whole model that one token is multiplied with, the head included."""
        return self.weights.active

    def linear_flops(self, tokens: int, rows: int) -> float:
        """Operations of the linear layers for `tokens` tokens and `rows` rows of logits."""
        weights = self.weights
        per_token = weights.dense
        if weights.experts is not None:
            per_token += weights.experts.active * weights.experts.params
        return 2.0 * (tokens * per_token + rows * weights.head) / self.ranks

    def weight_bytes(self, tokens: int) -> float:
        """Bytes of parameters that a step of `tokens` tokens reads; of experts, those touched."""
        if tokens == 0:
            return 0.0
        weights = self.weights
        read = weights.dense * self.dense_bytes + weights.head * self.head_bytes
        if weights.experts is not None:
            touched = weights.experts.touched(tokens)
            read += touched * weights.experts.params * self.expert_bytes
        return read / self.ranks


def _exchanges(model: Architecture) -> int:
    """All-reduces of a step: after every mixer and after every feed-forward layer."""
    mixers = sum(kind != "none" for kind in model.kinds)
    layers = range(len(model.kinds))
    return mixers + sum(feed_forward_kind(model, layer) != "none" for layer in layers)


def _link_bytes(model: Architecture, ranks: int) -> float:
    """What a rank sends per token in ring all-reduces of the hidden state, two bytes an element."""
    if ranks == 1:
        return 0.0
    hidden = model.fields.size("hidden_size")
    return _exchanges(model) * 2 * hidden * 2 * (ranks - 1) / ranks


def _dtypes(fields: Fields, weight_dtype: str | None) -> tuple[str, str]:
    """Of dense layers, and of experts."""
    if weight_dtype is not None:
        dtype = plain_dtype(weight_dtype)
        if dtype not in WEIGHT_BYTES:
            known = ", ".join(WEIGHT_BYTES)
            raise ConfigError(f"weight_dtype is {weight_dtype!r}; use one of {known}")
        return dtype, dtype
    said = _said(fields)
    quantized = fields.inner("quantization_config")
    if quantized is None:
        return said, said
    method = quantized.text_or_none("quant_method")
    if method not in _METHODS:
        raise ConfigError(
            f"quant_method of {quantized.where} is {method!r}; pass weight_dtype, one of "
            f"{', '.join(WEIGHT_BYTES)}"
        )
    dtype = _METHODS[method]
    return (said if method == "mxfp4" else dtype), dtype


def _said(fields: Fields) -> str:
    """The dtype of what is not quantized; bfloat16 if nobody says."""
    said = fields.text_or_none("dtype", "torch_dtype")
    dtype = "bfloat16" if said in (None, "auto") else plain_dtype(said)
    return dtype if dtype in WIDE else "bfloat16"
