"""`LLM`: prompts in, text out. Owns model, memory manager, scheduler and runner."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

import numpy as np

from kvtide.engine.answers import Answers, merge
from kvtide.engine.flights import Flight, Flights
from kvtide.engine.load import Loaded, load_model
from kvtide.engine.parallel import Alone
from kvtide.engine.request import (
    Delta,
    FinishReason,
    Request,
    RequestId,
    RequestOutput,
    SamplingParams,
)
from kvtide.engine.scheduler import Scheduler, SchedulerConfig
from kvtide.engine.stats import StepStats, Stopwatch
from kvtide.errors import InvariantError, KvError, RanksError, UsageError
from kvtide.manager import KVManager, Options
from kvtide.memory import DEFAULT_GRANULE_BYTES, MemfdMemory
from kvtide.torch import layout_from_model
from kvtide.types import Scope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Literal, Self

    from transformers import PreTrainedModel

    from kvtide.engine.load import Tokenizer
    from kvtide.engine.parallel import Place
    from kvtide.engine.plan import StepPlan
    from kvtide.ranks import Turn

Prompt: TypeAlias = "str | Sequence[int]"
Model: TypeAlias = "PreTrainedModel | Loaded | str | Path | None"


class Settings(TypedDict, total=False):
    """Fields of `EngineConfig` as keyword arguments of `LLM`."""

    memory_bytes: int
    max_sequences: int
    max_tokens: int
    block_tokens: int
    chunk_tokens: int
    mode: Literal["elastic", "static"]
    pool_ratio: Mapping[str, float] | None
    granule_bytes: int
    state_interval: int | None
    on_step: Callable[[StepStats], None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine.

    `memory_bytes` is for keys, values and states of all requests together. `max_tokens` bounds one
    sequence, prompt and answer; `chunk_tokens` the prompt tokens computed in one step, so that long
    prompts do not hold up those who wait for their next token. `state_interval` is the step, in
    tokens, of the grid on which recurrent states are kept (None: 1,024); a finer one keeps those
    that save few tokens too. `on_step` receives facts about each step after it.
    """

    memory_bytes: int = 512 << 20
    max_sequences: int = 32
    max_tokens: int = 4096
    block_tokens: int = 16
    chunk_tokens: int = 256
    mode: Literal["elastic", "static"] = "elastic"
    pool_ratio: Mapping[str, float] | None = None
    granule_bytes: int = DEFAULT_GRANULE_BYTES
    state_interval: int | None = None
    on_step: Callable[[StepStats], None] | None = None


class LLM:
    """A model that serves many requests at once from elastic pools.

    `model` is a loaded transformers model (then give its `tokenizer`), or anything that
    `load_model` takes. Use it in a `with` block, or call `close()`: it holds the memory of its
    caches until then. Not for use from several threads at once.

    `ranks` is this process's place among several that run the model together, as
    `kvtide.engine.parallel` says: all of them make the same calls in the same order, and of the
    model each keeps its part. RanksError once another one is lost, or differs.
    """

    def __init__(
        self,
        model: Model = None,
        tokenizer: Tokenizer | None = None,
        *,
        ranks: Place | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        loaded = _loaded(model, tokenizer)
        self.config = EngineConfig(**settings)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self._ranks = Alone() if ranks is None else ranks
        self._ranks.split(self.model)
        self.kv = self._begin()
        self._watch = Stopwatch()
        limits = _limits(self.config, self._ranks.depth)
        self._scheduler = Scheduler(self.kv, limits, watch=self._watch)
        self._runner = self._ranks.runner(self.model, self.kv, self._watch)
        self._flights = Flights(self._ranks.depth)
        self._answers = Answers(self._decode)
        self._eos_ids = _eos_ids(self.model)
        self._num_turns = self._num_steps = self._num_requests = self._num_idle = 0

    def _begin(self) -> KVManager:
        """A manager that the other ranks, if any, agree with."""
        try:
            kv = _manager(self.model, self.config, self._ranks)
        except KvError as error:
            self._ranks.halt(str(error))
            raise
        try:
            self._ranks.begin(kv)
        except KvError:
            kv.shut_down()
            raise
        return kv

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._ranks.end()
            elif not isinstance(error, RanksError):  # who has failed has told everybody
                self._ranks.halt(f"{type(error).__name__}: {error}")
        finally:
            self.close()

    def close(self) -> None:
        """End every request and give the memory back."""
        self._runner.close()
        self.kv.shut_down()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do, on any rank."""
        return self._ranks.has_work(self._scheduler.num_open)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts together; outputs in the order of the prompts.

        A request that can never fit has `finish` ERROR and says why; the others are not held up.
        """
        ids = self._add_all(prompts, params)
        outputs: dict[RequestId, RequestOutput] = {}
        for _ in self._drive(ids, outputs):
            pass
        outputs = self._ranks.collect(outputs)
        return [outputs[request_id] for request_id in ids]

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[tuple[int, Delta]]:
        """Answer all prompts together and yield (index of the prompt, what is new) as it comes.

        Leaving the loop early aborts what is not finished.
        """
        ids = self._add_all(prompts, params)
        index = {request_id: i for i, request_id in enumerate(ids)}
        for delta in self._drive(ids, {}):
            yield index[delta.request_id], delta

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        scope: Scope | None = None,
        priority: int = 0,
    ) -> RequestId:
        """Queue a request for the next `step`; its output waits in `take` once it has finished."""
        params = SamplingParams() if params is None else params
        if params.stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer; give LLM one, or use stop_token_ids")
        tokens = np.asarray(self._token_ids(prompt), dtype=np.int32)
        request = Request(
            id=RequestId(self._num_requests),
            prompt=tokens,
            params=params,
            scope=Scope() if scope is None else scope,
            priority=priority,
            seed=secrets.randbits(64) if params.seed is None else params.seed % 2**64,
            eos_ids=self._eos_ids,
        )
        self._num_requests += 1
        self._ranks.added()
        if self._ranks.serves(request.id):
            self._answers.open(request)
            self._scheduler.add(request)
        return request.id

    def abort(self, request_id: RequestId) -> bool:
        """End a request now; False if it has finished already. Its output has what there was."""
        found = self._scheduler.abort(request_id)
        self._collect()
        return found

    def take(self, request_id: RequestId) -> RequestOutput | None:
        """Remove and return the output of a finished request; None if it is not finished."""
        return self._answers.take(request_id)

    def step(self) -> list[Delta]:
        """Run one step: whatever is running gets on. Returns what is new, one delta a request."""
        started = perf_counter()
        self._watch.take()
        turn = self._ranks.boundary(self._flights.num_begun)
        plan = None if turn.drain else self._scheduler.schedule(self._num_turns % self._ranks.depth)
        self._num_turns += 1
        deltas = self._fly(plan)
        deltas += self._collect()
        self._ranks.stepped(self._scheduler.num_open)
        self._require_progress(turn, is_idle=plan is None and not deltas)
        if plan is not None and self.config.on_step is not None:
            self.config.on_step(self._stats(plan, perf_counter() - started))
        return merge(deltas)

    def _fly(self, plan: StepPlan | None) -> list[Delta]:
        """Begin a plan, and take in the tokens of the oldest one if as many as may be are begun."""
        flight = None
        if plan is not None:
            flight = Flight(plan)
            fence = flight if self._ranks.depth > 1 else None
            flight.tokens = self._ranks.share(self._runner.run(plan, fence))
        oldest = self._flights.push(flight)
        return [] if oldest is None else self._land(oldest)

    def _land(self, flight: Flight) -> list[Delta]:
        """Take in the tokens of a plan that has run."""
        deltas: list[Delta] = []
        for request, token in self._scheduler.commit(flight.plan, flight.land()):
            deltas.append(self._answers.push(request, token))
            if request.finish is None and self._answers.met_stop(request):
                self._scheduler.stop(request, FinishReason.STOP)
        return deltas

    def _require_progress(self, turn: Turn, *, is_idle: bool) -> None:
        """InvariantError if in no lane anything was run or refused, and nothing is to be awaited:
        steps in flight, here or (as far as this rank knows) elsewhere.
        """
        waits = turn.drain or self._flights.num_begun > 0 or self.kv.num_in_flight > 0
        is_stuck = is_idle and self._scheduler.has_work and not waits
        self._num_idle = self._num_idle + 1 if is_stuck else 0
        if self._num_idle >= self._ranks.depth:
            raise InvariantError("requests are waiting and none of them was run or refused")

    def _collect(self) -> list[Delta]:
        """Store the outputs of what has finished."""
        return [self._answers.finish(request) for request in self._scheduler.take_finished()]

    def _drive(
        self, ids: Sequence[RequestId], outputs: dict[RequestId, RequestOutput]
    ) -> Iterator[Delta]:
        """Step until all of `ids` have finished, moving their outputs to `outputs`.

        However the caller leaves, nothing of `ids` stays in the engine.
        """
        left = {request_id for request_id in ids if self._ranks.serves(request_id)}
        try:
            while self._ranks.has_work(len(left)):
                for delta in self.step():
                    if delta.request_id in left:
                        yield delta
                done = {request_id for request_id in left if request_id in self._answers}
                outputs.update((i, out) for i in done if (out := self.take(i)) is not None)
                left -= done
        finally:
            for request_id in left:
                self.abort(request_id)
                self.take(request_id)

    def _add_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestId]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise UsageError(
                f"{len(prompts)} prompts and {len(params)} sampling parameters; "
                f"give one for all, or one for each"
            )
        return [self.add(prompt, each) for prompt, each in zip(prompts, params, strict=True)]

    def _token_ids(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise UsageError("a prompt as text needs a tokenizer; give LLM one, or give token ids")
        return self.tokenizer(prompt)["input_ids"]

    def _decode(self, tokens: Sequence[int]) -> str:
        if self.tokenizer is None:  # ids in, ids out
            return ""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _stats(self, plan: StepPlan, seconds: float) -> StepStats:
        decode = sum(row.generates for row in plan.rows)
        self._num_steps += 1
        return StepStats(
            step=self._num_steps - 1,
            waiting=len(self._scheduler.waiting),
            running=len(plan.rows),
            prompt_tokens=int(plan.num_new.sum()) - decode,
            decode_tokens=decode,
            hit_tokens=plan.hit_tokens,
            recomputed_tokens=plan.recomputed_tokens,
            num_admitted=plan.num_admitted,
            num_preempted=plan.num_preempted,
            pause_ms=1000.0 * self._watch.take(),
            step_ms=1000.0 * seconds,
        )


def _loaded(model: Model, tokenizer: Tokenizer | None) -> Loaded:
    """What to run: a name to load, or a model that is loaded already."""
    if model is None:
        return load_model()
    if isinstance(model, str | Path):
        return load_model(model)
    if isinstance(model, Loaded):
        return model
    return Loaded(model=model, tokenizer=tokenizer, name=type(model).__name__)


def _manager(model: PreTrainedModel, config: EngineConfig, ranks: Place) -> KVManager:
    """A memory manager for `model`; it owns the memory it is given."""
    given: Any = model  # its dtype is read-only, which the stubs count as another type
    layout = layout_from_model(
        given,
        block_tokens=config.block_tokens,
        max_tokens=config.max_tokens,
        state_interval=config.state_interval,
    )
    num_bytes = ranks.memory(config.memory_bytes)
    if num_bytes < config.memory_bytes:  # what is left somewhere is no whole number of granules
        num_bytes -= num_bytes % config.granule_bytes
    memory = MemfdMemory(num_bytes, config.granule_bytes)
    try:
        return KVManager(
            layout,
            memory,
            max_sequences=config.max_sequences,
            max_tokens=config.max_tokens,
            options=Options(mode=ranks.mode(config.mode), pool_ratio=config.pool_ratio),
        )
    except KvError:
        memory.close()
        raise


def _limits(config: EngineConfig, lanes: int) -> SchedulerConfig:
    return SchedulerConfig(
        lanes=lanes,
        max_running=config.max_sequences,
        chunk_tokens=config.chunk_tokens,
        max_length=config.max_tokens,
    )


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """Tokens that end a turn, by the model's generation settings."""
    settings: Any = model.generation_config
    eos: int | list[int] | None = settings.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
