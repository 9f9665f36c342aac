"""The smallest engine: greedy, one forward a step, books checked after every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtide import Move
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvtide import KVManager, Scope, Sequence
    from kvtide.sequence import Step
    from kvtide.torch import PagedCache


@dataclass
class Driver:
    model: PreTrainedModel
    kv: KVManager
    cache: PagedCache
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    """By `id` of a sequence: logits after its newest computed token."""
    num_forwards: int = 0

    def start(self, ids: torch.Tensor, *, chunk: int = 512, scope: Scope | None = None) -> Sequence:
        """Open, admit and prefill a prompt [1, n] in chunks; the first token is sampled."""
        seq = self.kv.open(ids[0].numpy(), scope=scope)
        assert self.kv.admit([seq], min(chunk, seq.length - seq.hit))
        self.prefill(seq, chunk=chunk)
        return seq

    def prefill(self, seq: Sequence, *, chunk: int = 512) -> None:
        """Compute all that is known, then sample the next token."""
        left = seq.length - seq.computed
        while left:
            num_new = self.kv.chunk(seq, chunk)
            self.run([seq], num_new)
            left -= num_new

    def decode(self, seqs: list[Sequence], count: int) -> None:
        """`count` more tokens for each."""
        for _ in range(count):
            self.run(seqs, 1)

    @torch.no_grad()
    def run(self, seqs: list[Sequence], num_new: int | list[int]) -> None:
        """One step over all sequences; those that reach their last known token sample one.

        One forward, unless the model needs rows that are alike.
        """
        counts = np.array(np.broadcast_to(np.asarray(num_new, np.int64), len(seqs)))
        sampled = np.full(len(seqs), -1)
        with self.kv.step(seqs, counts) as step:
            for rows in self._calls(step.starts, counts):
                sampled[rows] = self._forward([seqs[i] for i in rows], counts[rows], step, rows)
        for i, seq in enumerate(seqs):
            if seq.computed + counts[i] < seq.length:
                sampled[i] = -1
        self.kv.commit(seqs, sampled)
        self.kv.check()

    def _calls(self, starts: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
        if self.cache.needs_equal_rows:
            return self.cache.split(starts, counts)
        return [np.arange(len(counts))]

    def _forward(
        self, seqs: list[Sequence], counts: np.ndarray, step: Step, rows: np.ndarray
    ) -> np.ndarray:
        ids = _right_aligned(seqs, counts)
        with self.cache.bind(step, rows.tolist()) as inputs:
            logits = self.model(ids, cache=self.cache, use_cache=True, **inputs).logits[:, -1]
        self.num_forwards += 1
        self.logits.update((id(seq), logits[i]) for i, seq in enumerate(seqs))
        return logits.argmax(-1).numpy()

    def choose(self, seq: Sequence, token: int) -> None:
        """Replace the sampled token that is not computed yet."""
        self.kv.trim(seq, 1)
        with self.kv.step([seq], 0):
            pass
        self.kv.commit([seq], [token])

    def squeeze(self) -> int:
        """Take almost every granule it can spare from each pool, so that live pages must move
        together, and give them back; returns live pages relocated."""
        before = self.kv.snapshot().pages_relocated
        names = list(self.kv.pools)
        for donor, receiver in zip(names, names[1:] + names[:1], strict=True):
            self._move(donor, receiver)
            self._move(receiver, donor)
        self.kv.check()
        return self.kv.snapshot().pages_relocated - before

    def _move(self, donor: str, receiver: str) -> None:
        facts = self.kv.snapshot().pools[donor]
        kept = ceil_div((facts.used + 6) * facts.page_bytes, self.kv.memory.granule_bytes)
        spare = max(1, facts.granules - kept)
        self.kv.rebalance((Move(donor=donor, receiver=receiver, granules=spare, reason="test"),))
        self.kv.settle()


def _right_aligned(seqs: list[Sequence], counts: np.ndarray) -> torch.Tensor:
    widest = int(counts.max())
    ids = torch.zeros((len(seqs), widest), dtype=torch.int64)
    for i, (seq, n) in enumerate(zip(seqs, counts.tolist(), strict=True)):
        new = seq.tokens[seq.computed : seq.computed + n]
        ids[i, widest - n :] = torch.from_numpy(new.astype(np.int64))
    return ids
