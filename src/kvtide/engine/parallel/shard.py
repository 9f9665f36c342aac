"""Tensor parallelism: this rank's part of every layer, made from a whole model in memory.

Feed-forward layers are split by columns, then rows. Attention is split by heads where the ranks
divide both kinds of heads; else every rank computes all of it, as with the one key-value head of
Gemma 3 270M. What follows a split is the sum over ranks, equal to the bit on all of them, so that
norms, residuals and logits are computed alike everywhere.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvtide.engine.parallel.link import Link

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}
_FEED_FORWARD = ({"gate_proj", "up_proj", "down_proj"}, {"up_proj", "down_proj"})


def shard(model: PreTrainedModel, link: Link) -> None:
    """Keep this rank's part of the model's weights, in place; its configuration then says so.

    ConfigError for a model whose layers are not understood, before anything has changed.
    """
    require_understood(model, link.size)
    whole: Any = model
    layers = decoder_layers(model)
    heads, kv_heads = whole.config.num_attention_heads, whole.config.num_key_value_heads
    by_heads = heads % link.size == 0 and kv_heads % link.size == 0
    for layer in layers:
        _split(layer.mlp, ("gate_proj", "up_proj"), "down_proj", link)
        if by_heads:
            _split(layer.self_attn, ("q_proj", "k_proj", "v_proj"), "o_proj", link)
    if by_heads:
        whole.config = _with_heads(whole.config, link.size)


def require_understood(model: PreTrainedModel, size: int) -> None:
    """ConfigError unless `size` ranks can split every layer."""
    whole: Any = model
    for number, layer in enumerate(decoder_layers(model)):
        _require_usual(number, layer, whole.config)
        found = layer.mlp.up_proj.out_features
        if found % size:
            raise ConfigError(
                f"layer {number} has {found} feed-forward units, which {size} ranks do not divide; "
                "use another number of ranks"
            )


def decoder_layers(model: PreTrainedModel) -> list[Any]:
    """The layers of a model that is one text decoder; ConfigError for others."""
    whole: Any = model
    layers: Any = getattr(whole.base_model, "layers", None)
    if layers is None or whole.config.get_text_config(decoder=True) is not whole.config:
        raise ConfigError(
            f"{type(model).__name__} is not one text decoder with layers; it cannot be split"
        )
    return list(layers)


class _RowParallel(nn.Module):
    """A linear layer of which this rank has some inputs: the sum over ranks is its output."""

    def __init__(self, linear: Any, link: Link) -> None:  # noqa: ANN401 (its bias may be None)
        super().__init__()
        self.weight = _part(linear.weight, link, dim=1)
        self.bias = linear.bias
        self._link = link

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Sum of all ranks' products, and the bias once."""
        outputs = nn.functional.linear(inputs, self.weight)
        self._link.add(outputs)
        return outputs if self.bias is None else outputs + self.bias


def _split(module: Any, columns: tuple[str, ...], row: str, link: Link) -> None:  # noqa: ANN401
    """Of the named linear layers keep some outputs, of the last the inputs that go with them."""
    for name in columns:
        linear: Any = getattr(module, name, None)
        if linear is not None:
            linear.weight = _part(linear.weight, link, dim=0)
            linear.out_features = linear.weight.shape[0]
            if linear.bias is not None:
                linear.bias = _part(linear.bias, link, dim=0)
    setattr(module, row, _RowParallel(getattr(module, row), link))
    for name in ("num_heads", "num_attention_heads", "num_key_value_heads"):
        if hasattr(module, name):
            setattr(module, name, getattr(module, name) // link.size)


def _part(weight: torch.Tensor, link: Link, *, dim: int) -> nn.Parameter:
    """This rank's part, in memory of its own so that the whole can be freed."""
    part = weight.detach().chunk(link.size, dim)[link.rank]
    return nn.Parameter(part.clone(), requires_grad=False)


def _with_heads(config: Any, size: int) -> Any:  # noqa: ANN401 (configurations have no one type)
    made = copy.deepcopy(config)
    made.head_dim = _head_dim(config)
    made.num_attention_heads = config.num_attention_heads // size
    made.num_key_value_heads = config.num_key_value_heads // size
    return made


def _head_dim(config: Any) -> int:  # noqa: ANN401
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _require_usual(number: int, layer: Any, config: Any) -> None:  # noqa: ANN401
    """Linear layers of the usual names and sizes, and nothing else that has weights."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if attention is None or mlp is None:
        raise _unknown(number, "it has no self_attn and mlp")
    names = _weighted(attention)
    if names - _NORMS != _ATTENTION or _weighted(mlp) not in _FEED_FORWARD:
        raise _unknown(number, f"its weights are {', '.join(sorted(names | _weighted(mlp)))}")
    size = _head_dim(config)
    wanted = {
        "q_proj": config.num_attention_heads * size,
        "k_proj": config.num_key_value_heads * size,
        "v_proj": config.num_key_value_heads * size,
    } | dict.fromkeys(names & _NORMS, size)
    for name, count in wanted.items():
        found = getattr(attention, name).weight.shape[0]
        if found != count:
            raise _unknown(number, f"{name} has {found} outputs, heads would have {count}")


def _weighted(module: nn.Module) -> set[str]:
    """Names of the parts, or parameters, that have weights."""
    return {name.partition(".")[0] for name, _ in module.named_parameters()}


def _unknown(number: int, why: str) -> ConfigError:
    return ConfigError(
        f"layer {number} cannot be split by tensors: {why}; understood are q, k, v, o and gate, "
        "up, down projections without experts"
    )
