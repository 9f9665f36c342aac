"""What an engine asks of the ranks it is one of; and the answers of one that is alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from kvtide.engine.runner import TorchRunner
from kvtide.ranks import Turn

if TYPE_CHECKING:
    from typing import TypeAlias

    from transformers import PreTrainedModel

    from kvtide.config import Mode
    from kvtide.engine.request import RequestId, RequestOutput
    from kvtide.engine.stats import Stopwatch
    from kvtide.manager import KVManager
    from kvtide.types import IntArray

    Outputs: TypeAlias = dict[RequestId, RequestOutput]


class Tokens(Protocol):
    """The ids that a step sampled, maybe still on their way."""

    def take(self) -> IntArray:
        """Wait for them: int64 [rows], -1 where none was due. The same on all that serve them."""
        ...


class Place(Protocol):
    """A process's place among those that run one model: what differs from being alone."""

    depth: int
    """Steps that are begun before the first of them ends."""

    def split(self, model: PreTrainedModel) -> None:
        """Keep this rank's part of the model, in place."""
        ...

    def mode(self, asked: Literal["elastic", "static"]) -> Mode:
        """The manager's mode where an engine alone would use `asked`."""
        ...

    def memory(self, asked: int) -> int:
        """Bytes for caches where an engine alone would take `asked`: what all ranks can have."""
        ...

    def begin(self, kv: KVManager) -> None:
        """Agree with the others on what all have, and change capacity together from now on."""
        ...

    def runner(self, model: PreTrainedModel, kv: KVManager, watch: Stopwatch) -> TorchRunner:
        """What computes this rank's part of a step."""
        ...

    def boundary(self, in_flight: int) -> Turn:
        """Between two steps, on every rank, whether it has work or not."""
        ...

    def share(self, tokens: IntArray) -> Tokens:
        """Take what one rank has sampled for all."""
        ...

    def serves(self, request_id: RequestId) -> bool:
        """Whether this rank is one that runs the request."""
        ...

    def added(self) -> None:
        """A request was added, on all ranks."""
        ...

    def stepped(self, num_open: int) -> None:
        """A step was made; so many requests are open on this rank."""
        ...

    def has_work(self, num_open: int) -> bool:
        """Whether a request is open on any rank; `num_open` are on this one."""
        ...

    def collect(self, outputs: Outputs) -> Outputs:
        """The outputs of all ranks."""
        ...

    def halt(self, why: str) -> None:
        """This rank cannot go on: tell the others."""
        ...

    def end(self) -> None:
        """All ranks have made their last step."""
        ...


@dataclass(frozen=True, slots=True)
class Arrived:
    """Ids that are here."""

    ids: IntArray

    def take(self) -> IntArray:
        """See `Tokens`."""
        return self.ids


class Alone:
    """The place of a process that runs the whole model by itself."""

    depth = 1

    def split(self, model: PreTrainedModel) -> None:
        """Nothing to split."""

    def mode(self, asked: Literal["elastic", "static"]) -> Mode:
        """As asked."""
        return asked

    def memory(self, asked: int) -> int:
        """As asked."""
        return asked

    def begin(self, kv: KVManager) -> None:
        """Nobody to agree with."""

    def runner(self, model: PreTrainedModel, kv: KVManager, watch: Stopwatch) -> TorchRunner:
        """One that computes everything."""
        return TorchRunner(model, kv, watch=watch)

    def boundary(self, in_flight: int) -> Turn:
        """Nothing to conclude."""
        del in_flight
        return _GO

    def share(self, tokens: IntArray) -> Tokens:
        """They are here."""
        return Arrived(tokens)

    def serves(self, request_id: RequestId) -> bool:
        """All of them."""
        del request_id
        return True

    def added(self) -> None:
        """Nobody else has it."""

    def stepped(self, num_open: int) -> None:
        """Nobody to tell."""

    def has_work(self, num_open: int) -> bool:
        """If one is open here."""
        return num_open > 0

    def collect(self, outputs: Outputs) -> Outputs:
        """They are here."""
        return outputs

    def halt(self, why: str) -> None:
        """Nobody to tell."""

    def end(self) -> None:
        """Nothing to conclude."""


_GO = Turn()
