"""Virtual time: how long one step of continuous batching takes on given hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtide.sim.costs.hardware import Hardware
    from kvtide.sim.costs.model import ModelCost
    from kvtide.sim.costs.reads import Reads
    from kvtide.types import IntArray

FloatArray = npt.NDArray[np.float64]

Amount: TypeAlias = float | FloatArray
"""Of one step, or of many at once."""

MAP_SECONDS = 63e-6
"""Unmapping a granule, mapping it elsewhere and granting access: 25.6 + 1.45 + 36 us on average
(cuMemUnmap, cuMemMap, cuMemSetAccess of 2 MiB on an A100: kvcached's bench of these calls)."""

GRANULE_BYTES = 2 << 20
"""What one of those calls moves."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds of a step: two rooflines, of the linear layers and of attention, one after the other.

    Each takes the longer of its arithmetic and its memory traffic, at the hardware's efficiencies;
    what ranks exchange and a fixed time a step come on top. A row that computes anything also
    computes one row of logits, as engines do, whether or not it samples.
    """

    model: ModelCost
    hardware: Hardware

    def __post_init__(self) -> None:
        """Refuse ranks that share layers without a link between them."""
        if self.model.exchanges and self.hardware.link_bandwidth is None:
            raise ConfigError(
                f"link_bandwidth of hardware {self.hardware.name!r} is missing, and "
                f"{self.model.ranks} ranks exchange data; add it in bytes/s one way"
            )

    def seconds(self, starts: IntArray, num_new: IntArray) -> float:
        """One step: row i has `starts[i]` computed tokens and computes `num_new[i]` >= 1 more.

        Both int64 [rows]. An empty step takes `step_seconds`.
        """
        tokens = int(num_new.sum())
        if tokens == len(num_new):
            work = [_one_token(reads, starts) for reads in self.model.reads]
        else:
            work = [_chunks(reads, starts, num_new) for reads in self.model.reads]
        return float(self._seconds(tokens, len(starts), work))

    def decode_seconds(self, starts: IntArray, count: int) -> FloatArray:
        """`count` successive steps of one token for each of the same rows, float64 [count].

        Element i is exactly `seconds(starts + i, ones)`.
        """
        work = [_successive(reads, starts, count) for reads in self.model.reads]
        rows = len(starts)
        return np.zeros(count) + self._seconds(rows, rows, work)

    def flops(self, starts: IntArray, num_new: IntArray) -> float:
        """Operations of one step on one rank: linear layers, attention, logits."""
        tokens = int(num_new.sum())
        work = [_chunks(reads, starts, num_new) for reads in self.model.reads]
        return float(
            self.model.linear_flops(tokens, len(starts)) + self._attention_flops(tokens, work)
        )

    def decode_flops(self, starts: IntArray, count: int) -> float:
        """Operations of `count` successive steps of one token for each of the same rows."""
        rows = len(starts)
        work = [_successive(reads, starts, count) for reads in self.model.reads]
        attention = np.zeros(count) + self._attention_flops(rows, work)
        return count * self.model.linear_flops(rows, rows) + float(attention.sum())

    def move_seconds(self, num_bytes: int, copies: int) -> float:
        """A pause that hands `num_bytes` of granules to another pool and first copies `copies`
        bytes of pages out of the way: `MAP_SECONDS` a granule of 2 MiB, and half the bandwidth,
        as a copy reads and writes."""
        granules = -(-num_bytes // GRANULE_BYTES)
        return granules * MAP_SECONDS + 2 * copies / self.hardware.byte_rate

    def _seconds(self, tokens: int, rows: int, work: Sequence[tuple[Amount, Amount]]) -> Amount:
        model, hardware = self.model, self.hardware
        flop_rate, byte_rate = hardware.flop_rate(model.compute_dtype), hardware.byte_rate
        linear = max(
            model.linear_flops(tokens, rows) / flop_rate,
            model.weight_bytes(tokens) / byte_rate,
        )
        fixed = linear + hardware.step_seconds + self._exchange_seconds(tokens)
        fixed += tokens * hardware.token_seconds
        compute = self._attention_flops(tokens, work) / hardware.flop_rate("bfloat16")
        memory = self._cache_bytes(tokens, rows, work) / byte_rate
        if isinstance(compute, float) and isinstance(memory, float):
            return fixed + max(compute, memory)
        return fixed + np.maximum(compute, memory)

    def _exchange_seconds(self, tokens: int) -> float:
        model, hardware = self.model, self.hardware
        if not model.exchanges or not hardware.link_bandwidth:
            return 0.0
        rate = hardware.link_bandwidth * hardware.link_efficiency
        return model.exchanges * hardware.link_seconds + tokens * model.link_bytes / rate

    def _attention_flops(self, tokens: int, work: Sequence[tuple[Amount, Amount]]) -> Amount:
        total: Amount = tokens * self.model.state_flops
        for flops, _ in work:
            total = total + flops
        return total

    def _cache_bytes(self, tokens: int, rows: int, work: Sequence[tuple[Amount, Amount]]) -> Amount:
        total: Amount = rows * self.model.state_bytes + tokens * self.model.write_bytes
        for reads, (_, read) in zip(self.model.reads, work, strict=True):
            total = total + read * reads.token_bytes
        return total


# Amounts are whole numbers, exact in float64 below 2^53, whichever way they were added up: that is
# why fast-forwarding and single steps agree to the last bit.


def _one_token(reads: Reads, starts: IntArray) -> tuple[float, float]:
    """Operations and tokens read, over rows that compute one token each."""
    if reads.limit is None:
        pairs = float(starts.sum()) + len(starts)
    else:
        pairs = float(np.minimum(starts + 1, reads.limit).sum())
    return pairs * reads.pair_flops, pairs


def _chunks(reads: Reads, starts: IntArray, num_new: IntArray) -> tuple[float, float]:
    """The same over rows that compute `num_new` each; a chunk reads a token once."""
    ends = starts + num_new
    if reads.limit is None:
        pairs = num_new * (starts + ends + 1) / 2
        return _chunk_flops(reads, pairs, ends), float(ends.sum())
    limit = reads.limit
    pairs = float((_triangle(ends, limit) - _triangle(starts, limit)).sum())
    reach = num_new * limit if reads.picks else num_new + (limit - 1)
    return pairs * reads.pair_flops, float(np.minimum(ends, reach).sum())


def _chunk_flops(reads: Reads, pairs: FloatArray, ends: IntArray) -> float:
    """Of rows with so many (query, key) pairs that end there: latents are widened if that pays."""
    if not reads.widen_flops:
        return float(pairs.sum()) * reads.pair_flops
    widened = pairs * reads.wide_pair_flops + ends * reads.widen_flops
    return float(np.minimum(pairs * reads.pair_flops, widened).sum())


def _triangle(ends: IntArray, limit: int) -> IntArray:
    """Sum of min(n, limit) over n = 1 ... end."""
    head = np.minimum(ends, limit)
    return head * (head + 1) // 2 + (ends - head) * limit


def _successive(reads: Reads, starts: IntArray, count: int) -> tuple[FloatArray, FloatArray]:
    """`_one_token` of `starts`, `starts + 1` ... as arrays [count]."""
    steps = np.arange(count, dtype=np.int64)
    if reads.limit is None:
        pairs = (int(starts.sum()) + len(starts) * (steps + 1)).astype(np.float64)
        return pairs * reads.pair_flops, pairs
    # Rows below their limit grow by one a step; the others stay there.
    ordered = np.sort(starts)
    below = np.searchsorted(ordered, reads.limit - 1 - steps)
    sums = np.concatenate(([0], np.cumsum(ordered)))
    pairs = sums[below] + below * (steps + 1) + (len(starts) - below) * reads.limit
    pairs = pairs.astype(np.float64)
    return pairs * reads.pair_flops, pairs
