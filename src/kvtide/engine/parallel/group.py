"""Several processes that run one model: how each axis splits it, and how they go in step.

    torch.distributed.init_process_group("gloo")  # torchrun sets the rest
    with LLM(model, ranks=TensorRanks()) as llm:  # the same on every rank
        outputs = llm.generate(prompts)           # the same calls in the same order

Every rank runs the same engine over its own manager. Requests, and with them all decisions, are the
same on all ranks, or (attention data parallel) each rank has a share of them; either way steps are
made in step, and what changes capacity is agreed between them.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import torch

from kvtide.engine.parallel.alone import Alone, Arrived
from kvtide.engine.parallel.link import Link
from kvtide.engine.parallel.shard import shard
from kvtide.engine.request import RequestOutput
from kvtide.errors import ConfigError
from kvtide.ranks import (
    Agreement,
    Quota,
    Terms,
    Turn,
    agree_quotas,
    fingerprint_of,
    free_host_bytes,
)
from kvtide.torch.ranks import DistributedTransport

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvtide.engine.parallel.alone import Outputs, Tokens
    from kvtide.engine.request import RequestId
    from kvtide.manager import KVManager
    from kvtide.ranks import Axis
    from kvtide.types import IntArray

_NUMBERS = count()
"""Of the groups of this process: they are made in the same order on all ranks."""

PROBE = (3, 5, 8, 13, 21, 34)
"""Token ids of a text that is computed before and after a split."""


class Ranks(Alone):
    """What all axes have in common. The model must be on the CPU: ranks talk by gloo.

    A tick of the agreement comes every `every` steps; `deadline` seconds may pass until another
    rank is heard, in a tick or within a step.
    """

    axis: Axis
    decides: Literal["leader", "replicated"] = "replicated"

    def __init__(self, *, every: int = 8, deadline: float = 30.0) -> None:
        self.terms = Terms(axis=self.axis, mode=self.decides, every=every, deadline=deadline)
        name = f"kvtide-engine/{next(_NUMBERS)}"
        self.transport = DistributedTransport(name=name, timeout=2 * deadline)
        self.link = Link(deadline, self.transport.failure)
        self._agreement: Agreement | None = None
        self._whole: PreTrainedModel | None = None

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.link.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self.link.size

    @property
    def agreement(self) -> Agreement:
        """What changes capacity on all ranks, from `begin` on; `propose` to it."""
        assert self._agreement is not None, "no engine has begun with these ranks"
        return self._agreement

    def split(self, model: PreTrainedModel) -> None:
        """See `Place`. ConfigError on all ranks if one of them could not, or if the parts together
        compute something else than the whole. A second call for a model does nothing.
        """
        if model is self._whole:
            return
        self._whole = model
        before = logits_of(model)
        error = self._try_split(model)
        if told := [text for text in self.link.gather(error) if text]:
            raise ConfigError(told[0])
        after = self._answer(model)
        wrong = 0.0 if after is None else float((after - before).abs().max() / _scale(before))
        if self.link.total(wrong > 1.0):
            raise ConfigError(
                f"the parts of {type(model).__name__} on {self.size} ranks compute other logits "
                "than the whole; it cannot be split this way"
            )

    def memory(self, asked: int) -> int:
        """See `Place`: the least that any rank's machine has left for it, if less than asked."""
        quota = Quota(asked=asked, free=free_host_bytes(), is_shared=True)
        seconds = self.terms.deadline
        return agree_quotas(self.transport, {"host": quota}, seconds=seconds)["host"].num_bytes

    def begin(self, kv: KVManager) -> None:
        """See `Place`."""
        sizes = (kv.memory.granule_bytes, kv.memory.num_granules) if self.axis == "tensor" else ()
        alike = fingerprint_of(kv.layout, self.axis, sizes, kv.max_tokens, kv.options.mode)
        agree_quotas(self.transport, {}, fingerprint=alike, seconds=self.terms.deadline)
        self._agreement = Agreement(kv, self.transport, self.terms)

    def boundary(self, in_flight: int) -> Turn:
        """See `Place`."""
        return self.agreement.boundary(in_flight)

    def halt(self, why: str) -> None:
        """See `Place`."""
        if self._agreement is not None:
            self._agreement.halt(why)
        else:
            self.transport.halt(why)

    def end(self) -> None:
        """See `Place`."""
        if self._agreement is not None:
            self._agreement.close()

    def _try_split(self, model: PreTrainedModel) -> str:
        """Split; the reason why not if it cannot be."""
        try:
            self._split(model)
        except ConfigError as error:
            return str(error)
        return ""

    def _split(self, model: PreTrainedModel) -> None:
        """Keep this rank's part."""

    def _answer(self, model: PreTrainedModel) -> torch.Tensor | None:
        """Logits of the probe by all ranks together, where they come out."""
        return logits_of(model)


class TensorRanks(Ranks):
    """Every rank computes a part of every layer, for all requests.

    Pools trade granules as they would alone: all ranks see the same demand and come to the same
    trades, and the ticks hold them to it.
    """

    axis = "tensor"

    def share(self, tokens: IntArray) -> Tokens:
        """See `Place`: those of rank 0."""
        return self.link.share(tokens, 0)

    def _split(self, model: PreTrainedModel) -> None:
        shard(model, self.link)


class DataRanks(Ranks):
    """Attention data parallel: every rank computes the whole of its own requests.

    Request i is served by rank i mod n. Pools and plans are each rank's own; only the moment at
    which agreed changes are made is shared. `LLM.generate` returns all outputs on every rank;
    `stream` and `take` know those that are served here.
    """

    axis = "attention_data"

    def __init__(self, *, every: int = 8, deadline: float = 30.0) -> None:
        super().__init__(every=every, deadline=deadline)
        self._num_open = 0

    def split(self, model: PreTrainedModel) -> None:
        """Nothing to split: the attention is whole on every rank."""

    def serves(self, request_id: RequestId) -> bool:
        """See `Place`."""
        return request_id % self.size == self.rank

    def share(self, tokens: IntArray) -> Tokens:
        """See `Place`: each rank's are its own."""
        return Arrived(tokens)

    def added(self) -> None:
        """See `Place`."""
        self._num_open += 1

    def stepped(self, num_open: int) -> None:
        """See `Place`: every rank tells, so that all know whether any has work."""
        self._num_open = int(self.link.total(num_open))

    def has_work(self, num_open: int) -> bool:
        """See `Place`. As of the last step, so that all ranks say the same."""
        del num_open
        return self._num_open > 0

    def collect(self, outputs: Outputs) -> Outputs:
        """See `Place`."""
        told = self.link.gather([output.to_json() for output in outputs.values()])
        every = [RequestOutput.from_json(row) for part in told for row in part]
        return {output.request_id: output for output in every}


@torch.inference_mode()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    """Logits after the probe, float [vocabulary]."""
    whole: Any = model
    ids = torch.tensor([PROBE]) % whole.config.vocab_size
    return whole(ids, use_cache=False, logits_to_keep=1).logits[0, -1]


def _scale(logits: torch.Tensor) -> float:
    """What rounding may change: half the digits of the model's dtype."""
    return float(logits.abs().max()) * float(torch.finfo(logits.dtype).eps) ** 0.5
