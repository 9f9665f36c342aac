"""What runs in one step, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtide.errors import UsageError

if TYPE_CHECKING:
    from kvtide.engine.request import Request
    from kvtide.sequence import Batch, Sequence
    from kvtide.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Tokens `[start, start + num_new)` of one request, computed in this step.

    `samples` says whether they reach the end of what is known, so that a token can be picked;
    `generates` whether it is the last token of an answer that is computed, to go on with it.
    """

    request: Request
    start: int
    num_new: int
    samples: bool

    @classmethod
    def of(cls, request: Request, num_new: int) -> Row:
        """The next `num_new` tokens of a request."""
        start = sequence_of(request).computed
        samples = start + num_new == request.length
        return cls(request=request, start=start, num_new=num_new, samples=samples)

    @property
    def generates(self) -> bool:
        """Whether this is decoding, not a prompt or something computed again."""
        return self.num_new == 1 and self.start >= len(self.request.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: rows, the manager's batch of their sequences, and what was decided on the way."""

    rows: tuple[Row, ...]
    batch: Batch
    num_new: IntArray
    hit_tokens: int
    recomputed_tokens: int
    num_admitted: int
    num_preempted: int


def sequence_of(request: Request) -> Sequence:
    """The sequence of a request that is open."""
    if request.sequence is None:
        raise UsageError(f"request {request.id} has no open sequence")
    return request.sequence


def num_remaining(request: Request) -> int:
    """Known tokens whose keys and values do not exist yet."""
    return request.length - sequence_of(request).computed
