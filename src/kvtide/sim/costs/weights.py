"""How many parameters a model has, and which of them a token is multiplied with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtide.errors import ConfigError
from kvtide.sim.costs.feedforward import expert_numbers, feed_forward
from kvtide.sim.costs.mixers import mixer_params

if TYPE_CHECKING:
    from kvtide.layout.fields import Fields
    from kvtide.sim.costs.architecture import Architecture

_TIED = ("gemma", "vaultgemma", "cohere")
"""Families whose embeddings are their head unless they say otherwise."""

_OWN_SHAPES = (
    "afmoe",
    "doge",
    "gemma3n",
    "gemma3n_text",
    "lfm2",
    "llama4_text",
    "nemotron-nas",
    "qwen4_exp",
    "qwen4_exp_text",
)
"""Families that are built of more, or of other parts, than is counted here."""


_CURE = "pass params and active_params, the published totals"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """`num` experts in a layer of which a token uses `active`; `params`: one expert, all layers."""

    num: int
    active: int
    params: float

    def touched(self, tokens: int) -> float:
        """Experts of a layer that at least one of `tokens` tokens uses, if any is as likely."""
        return self.num * (1.0 - (1.0 - self.active / self.num) ** tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Parameters of a whole model.

    `dense` are multiplied with every token (attention, feed-forward, routers, shared experts),
    `head` with every row of logits, `embedding` with none. A tied head is the embedding, and
    counts once. Norms and biases are left out: below 0.2 % everywhere.
    """

    dense: float
    head: float
    embedding: float
    experts: Experts | None = None
    is_tied: bool = False

    @property
    def total(self) -> float:
        """All parameters."""
        experts = self.experts.num * self.experts.params if self.experts else 0.0
        return self.dense + experts + self.embedding + (0.0 if self.is_tied else self.head)

    @property
    def active(self) -> float:
        """Those that a token which gives logits is multiplied with."""
        experts = self.experts.active * self.experts.params if self.experts else 0.0
        return self.dense + experts + self.head


def weights_of(model: Architecture) -> Weights:
    """Count them from the fields of a configuration; ConfigError naming one that is missing."""
    fields = model.fields
    if model.family in _OWN_SHAPES or fields.count_or_none("hidden_size_per_layer_input"):
        raise ConfigError(
            f"model_type is {model.family!r}, which has parts whose parameters are not counted "
            f"from its fields; {_CURE}"
        )
    try:
        return _counted(model)
    except ConfigError as error:
        raise ConfigError(f"cannot count parameters: {error}; or {_CURE}") from error


def _counted(model: Architecture) -> Weights:
    fields = model.fields
    layers = [feed_forward(model, layer) for layer in range(len(model.kinds))]
    dense = sum(mixer_params(model, layer) for layer in range(len(model.kinds)))
    dense += sum(layer.dense for layer in layers)
    expert = sum(layer.expert for layer in layers)
    vocabulary = fields.size("vocab_size") * fields.size("hidden_size")
    experts = None
    if expert:
        num, active = expert_numbers(fields)
        experts = Experts(num=num, active=active, params=expert)
    return Weights(
        dense=dense,
        head=vocabulary,
        embedding=vocabulary,
        experts=experts,
        is_tied=_is_tied(model),
    )


def weights_from_totals(fields: Fields, params: float, active_params: float | None) -> Weights:
    """Split published totals: what is not active is in experts, of which the fields say how many.

    `active_params` (default: all) includes the head, and an embedding that is not tied is not
    active.
    """
    active = params if active_params is None else active_params
    for name, value in (("params", params), ("active_params", active)):
        if not 0 < value <= params:
            raise ConfigError(
                f"{name} is {value!r}; give a number above 0, and active_params <= params"
            )
    vocabulary = fields.size_or_none("vocab_size") or 0
    table = min(vocabulary * (fields.size_or_none("hidden_size") or 0), active)
    if active == params:
        return Weights(dense=params - table, head=table, embedding=table, is_tied=True)
    num, used = expert_numbers(fields)
    if used >= num:
        raise fields.unknown("num_experts_per_tok", used, f"fewer than the {num} experts")
    idle = params - active
    expert = idle / (num - used)
    dense = active - used * expert - table
    if dense < 0:
        raise ConfigError(
            f"active_params is {active_params!r} of {params!r}: {used} of {num} experts alone are "
            "more; check both"
        )
    experts = Experts(num=num, active=used, params=expert)
    return Weights(dense=dense, head=table, embedding=table, experts=experts, is_tied=True)


def _is_tied(model: Architecture) -> bool:
    return model.fields.flag("tie_word_embeddings", default=model.family.startswith(_TIED))
