"""Runs one planned step: the model over paged keys and values, then a token per row that is due."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from kvtide.engine.sampling import Settings, sample
from kvtide.torch import PagedCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvtide.engine.plan import Row, StepPlan
    from kvtide.engine.stats import Stopwatch
    from kvtide.manager import KVManager
    from kvtide.pool import Fence
    from kvtide.sequence import Step
    from kvtide.types import IntArray


class Runner(Protocol):
    """What an engine needs of a runner; a simulator brings its own."""

    def run(self, plan: StepPlan, fence: Fence | None = None) -> IntArray:
        """Compute the plan's tokens; int64 [rows], the token picked for each row or -1.

        `fence`: when the step is over, if not at the end of this call.
        """
        ...

    def close(self) -> None:
        """Let go of everything that points into the manager's memory."""
        ...


class TorchRunner:
    """Runs an unmodified transformers model over the pools of `kv`."""

    def __init__(self, model: PreTrainedModel, kv: KVManager, *, watch: Stopwatch) -> None:
        self._model: Any = model
        self._kv, self._watch = kv, watch
        self._cache: PagedCache | None = PagedCache(kv, self._model)

    @torch.inference_mode()
    def run(self, plan: StepPlan, fence: Fence | None = None) -> IntArray:
        """Compute the plan's tokens inside one manager step; -1 where no token is due.

        Rows that are alike, as `PagedCache.split` says, share a forward: those that generate are
        one for most models, and nothing is padded in its new tokens.
        """
        assert self._cache is not None, "the runner is closed"
        tokens = np.full(len(plan.rows), -1, dtype=np.int64)
        with ExitStack() as stack:
            with self._watch:
                step = stack.enter_context(self._kv.step(plan.batch, plan.num_new))
            step.fence = fence
            for indices in self._cache.split(step.starts, plan.num_new):
                tokens[indices] = self._forward([plan.rows[i] for i in indices], step, indices)
        return tokens

    def close(self) -> None:
        """Drop the views of the arenas."""
        self._cache = None

    def _forward(self, rows: list[Row], step: Step, indices: IntArray) -> IntArray:
        """One model call for rows `indices` of the step, which compute equally many tokens."""
        assert self._cache is not None, "the runner is closed"
        tokens = np.full(len(rows), -1, dtype=np.int64)
        due = [i for i, row in enumerate(rows) if row.samples]
        ids = torch.as_tensor(np.stack([_new_tokens(row) for row in rows]))
        with self._cache.bind(step, indices.tolist()) as inputs:
            given: dict[str, Any] = {"cache": self._cache, "use_cache": True, **inputs}
            logits = self._compute(ids.to(self._model.device), given, is_due=bool(due))
        if logits is None:
            return tokens
        if len(due) < len(rows):  # picking all rows would only copy them: 1 MB each
            logits = logits[due]
        tokens[due] = sample(logits, Settings.of([rows[i].request for i in due]))
        return tokens

    def _compute(
        self, ids: torch.Tensor, given: dict[str, Any], *, is_due: bool
    ) -> torch.Tensor | None:
        """One model call on `ids` [rows, new]; the logits after each row if any token is due."""
        if is_due:
            return self._model(ids, logits_to_keep=1, **given).logits[:, -1]
        # A chunk in the middle of a prompt needs no logits, and a vocabulary's matrix is the
        # largest of a small model.
        self._model.base_model(ids, **given)
        return None


def _new_tokens(row: Row) -> IntArray:
    """The ids this row computes, int64 [num_new]."""
    sequence = row.request.sequence
    assert sequence is not None, f"request {row.request.id} has no open sequence"
    return sequence.tokens[row.start : row.start + row.num_new].astype(np.int64)
