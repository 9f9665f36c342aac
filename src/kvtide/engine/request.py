"""What a caller asks for, what happens to it, and what comes back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NewType

from kvtide.errors import ConfigError
from kvtide.types import Scope

if TYPE_CHECKING:
    from kvtide.sequence import Sequence
    from kvtide.types import TokenArray

RequestId = NewType("RequestId", int)


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    """The model ended its turn, or a stop token or stop string appeared."""
    LENGTH = "length"
    """`max_tokens` new tokens, or the longest sequence the manager holds."""
    ABORT = "abort"
    """The caller gave up."""
    ERROR = "error"
    """It can never fit; the output's `error` says which pool and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to pick tokens and when to stop.

    `temperature` 0 is greedy. `seed` makes a sampled answer repeatable, whatever else is in the
    batch and however often the request is preempted; None draws one. Stop strings are not part of
    the text; a stop token ends the token ids but gives no text.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Refuse values no sampler could follow."""
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; ask for at least 1 new token")
        if not self.temperature >= 0.0:
            raise ConfigError(f"temperature is {self.temperature}; use 0 (greedy) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p is {self.top_p}; use a share in (0, 1], 1 keeps every token")
        if "" in self.stop:
            raise ConfigError("stop holds an empty string, which ends every answer; remove it")


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One prompt on its way through the engine; the scheduler owns and changes it."""

    id: RequestId
    prompt: TokenArray
    params: SamplingParams
    scope: Scope = field(default_factory=Scope)
    priority: int = 0
    seed: int = 0
    eos_ids: frozenset[int] = frozenset()
    arrival: int = 0
    lane: int = 0
    output: list[int] = field(default_factory=list[int])
    sequence: Sequence | None = None
    hit_tokens: int = 0
    recomputed_tokens: int = 0
    num_preempted: int = 0
    reached: int = 0
    """Most tokens that were ever computed; what lies below and is computed again is recomputed."""
    finish: FinishReason | None = None
    error: str | None = None

    @property
    def length(self) -> int:
        """Tokens known: prompt and answer so far."""
        return len(self.prompt) + len(self.output)

    def reason_to_stop(self, token: int, max_length: int) -> FinishReason | None:
        """Why `token`, just appended to `output`, is the last one, or None."""
        ends = token in self.params.stop_token_ids
        if ends or (token in self.eos_ids and not self.params.ignore_eos):
            return FinishReason.STOP
        if len(self.output) >= self.params.max_tokens or self.length >= max_length:
            return FinishReason.LENGTH
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step added to one request; `finish` is set on the last one."""

    request_id: RequestId
    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request. `hit_tokens` of the prompt came from the cache when it was admitted."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish: FinishReason
    error: str | None
    hit_tokens: int
    recomputed_tokens: int
    num_preempted: int

    def to_json(self) -> dict[str, Any]:
        """Its fields, as JSON has them."""
        return {**asdict(self), "finish": self.finish.value}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> RequestOutput:
        """The output that `to_json` gave."""
        fields: dict[str, Any] = {**row, "finish": FinishReason(row["finish"])}
        for name in ("prompt_token_ids", "token_ids"):
            fields[name] = tuple(row[name])
        return cls(**fields)
