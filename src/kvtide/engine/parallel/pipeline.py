"""Pipeline parallelism: this rank's layers, made from a whole model in memory, and their steps.

A stage is a smaller model of the same class: its layers are numbered from 0, and its configuration
says so, so that layouts, caches and masks are made for it as for any other. The first stage embeds,
the others begin with what the one before them sends; the last one samples.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from kvtide.engine.parallel.group import PROBE, Ranks
from kvtide.engine.parallel.shard import decoder_layers
from kvtide.engine.runner import TorchRunner
from kvtide.errors import ConfigError
from kvtide.layout import Parallel
from kvtide.ranks import agree_pages, free_host_bytes
from kvtide.torch import layout_from_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvtide.config import Mode
    from kvtide.engine.parallel.alone import Tokens
    from kvtide.engine.parallel.link import Link
    from kvtide.engine.stats import Stopwatch
    from kvtide.manager import KVManager
    from kvtide.types import IntArray

_PARTS = frozenset({"embed_tokens", "layers", "norm"})


class PipelineRanks(Ranks):
    """Every rank computes some of the layers, for all requests, one behind the other.

    As many steps are in flight as there are stages. A page has as many bytes as its stage has
    layers of its kind, so pools have equal numbers of pages: rank 0 proposes the trades that its
    pools would make by themselves, and sizes change when no step is in flight.
    """

    axis = "pipeline"
    decides = "leader"

    @property
    def depth(self) -> int:
        """See `Place`."""
        return self.size

    def mode(self, asked: Literal["elastic", "static"]) -> Mode:
        """See `Place`."""
        return "dry_run" if asked == "elastic" else "static"

    def memory(self, asked: int) -> int:
        """See `Place`: each stage's own, since pages are made equal afterwards."""
        return min(asked, free_host_bytes())

    def begin(self, kv: KVManager) -> None:
        """See `Place`."""
        super().begin(kv)
        mine = {name: pool.num_usable for name, pool in kv.pools.items()}
        kv.resize(agree_pages(self.transport, mine, seconds=self.terms.deadline))

    def runner(self, model: PreTrainedModel, kv: KVManager, watch: Stopwatch) -> TorchRunner:
        """See `Place`."""
        return _StageRunner(model, kv, self.link, watch)

    def share(self, tokens: IntArray) -> Tokens:
        """See `Place`: those of the last stage, when they are there."""
        return self.link.share(tokens, self.size - 1)

    def _split(self, model: PreTrainedModel) -> None:
        stages = stage_configs(model, self.size)
        _require_whole(model.config, stages)
        _keep(model, stages[self.rank], self.rank, self.size)

    @torch.inference_mode()
    def _answer(self, model: PreTrainedModel) -> torch.Tensor | None:
        ids = torch.tensor([PROBE]) % model.config.vocab_size
        logits = _pass_on(model, self.link, ids, {"use_cache": False}, is_due=True)
        return None if logits is None else logits[0]


class _StageRunner(TorchRunner):
    """Runs one stage of a model over the pools of `kv`."""

    def __init__(self, model: PreTrainedModel, kv: KVManager, link: Link, watch: Stopwatch) -> None:
        super().__init__(model, kv, watch=watch)
        self._link = link

    def _compute(
        self, ids: torch.Tensor, given: dict[str, Any], *, is_due: bool
    ) -> torch.Tensor | None:
        return _pass_on(self._model, self._link, ids, given, is_due=is_due)


def _pass_on(
    model: Any,  # noqa: ANN401 (the stubs of transformers know neither its layers nor its output)
    link: Link,
    ids: torch.Tensor,
    given: dict[str, Any],
    *,
    is_due: bool,
) -> torch.Tensor | None:
    """Compute this stage's layers; logits [rows, vocabulary] on the last stage, if any are due."""
    if link.rank:
        shape = (*ids.shape, model.config.hidden_size)
        begin = {"inputs_embeds": link.receive(shape, model.dtype, link.rank - 1)}
    else:
        begin = {"input_ids": ids}
    if link.rank < link.size - 1:
        link.send(model.base_model(**begin, **given).last_hidden_state, link.rank + 1)
        return None
    if is_due:
        return model(logits_to_keep=1, **begin, **given).logits[:, -1]
    model.base_model(**begin, **given)
    return None


def stage_configs(model: PreTrainedModel, stages: int) -> list[Any]:
    """The configurations of the models that the stages are."""
    return [_config_of(model, stage, stages) for stage in range(stages)]


def _config_of(model: PreTrainedModel, stage: int, stages: int) -> Any:  # noqa: ANN401
    """The configuration of the model that a stage is."""
    config: Any = copy.deepcopy(model.config)
    mine = Parallel(pipeline=stages, stage=stage).layers(len(decoder_layers(model)))
    config.num_hidden_layers = len(mine)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[mine.start : mine.stop]
    return config


def _require_whole(config: Any, stages: list[Any]) -> None:  # noqa: ANN401
    """Every stage has every kind of layer, and all together those of the whole; no recurrent state.

    Else stages would decide differently: where prompts are cut follows from states, and what is
    found of a prefix from all kinds of layers.
    """
    whole = layout_from_model(config, block_tokens=64)
    kinds = {group.name: len(group.layers) for group in whole.groups}
    for group in whole.groups:
        if group.is_state:
            raise ConfigError(
                f"group {group.name!r} keeps recurrent states, which stages cannot agree on; "
                "use tensor or attention data parallelism"
            )
    parts = [
        {g.name: len(g.layers) for g in layout_from_model(c, block_tokens=64).groups}
        for c in stages
    ]
    for stage, part in enumerate(parts):
        if part.keys() != kinds.keys():
            raise ConfigError(
                f"stage {stage} of {len(parts)} has layers {', '.join(part)}, the model "
                f"{', '.join(kinds)}: every stage needs some of each; use fewer stages"
            )
    if any(sum(part[name] for part in parts) != count for name, count in kinds.items()):
        raise ConfigError("what stages cache is not what the model caches; it cannot be cut")


def _keep(model: Any, config: Any, stage: int, stages: int) -> None:  # noqa: ANN401
    """Keep one stage's layers, in place."""
    decoder = model.base_model
    extra = {name.partition(".")[0] for name, _ in decoder.named_parameters()} - _PARTS
    if extra:
        raise ConfigError(f"the decoder has weights in {', '.join(extra)}; it cannot be cut")
    mine = Parallel(pipeline=stages, stage=stage).layers(len(decoder.layers))
    decoder.layers = nn.ModuleList(decoder.layers[i] for i in mine)
    for number, layer in enumerate(decoder.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, "layer_idx", number)  # noqa: B010 (stubs: only tensors and modules)
    model.config = decoder.config = config
    if stage:
        decoder.embed_tokens = nn.Identity()
    if stage < stages - 1:
        decoder.norm, model.lm_head = nn.Identity(), nn.Identity()
