"""Logits -> token ids for a whole batch at once. Pure: the same arguments give the same ids.

Randomness is a number per (seed, position), not a generator with state: an answer does not depend
on its neighbours in the batch, on preemption, or on how the prompt was cut into chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kvtide.engine.request import Request

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sampling settings of a batch: float64 and uint64/int64 arrays of shape `[rows]`."""

    temperature: npt.NDArray[np.float64]
    top_p: npt.NDArray[np.float64]
    seed: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Settings:
        """Collect the settings of `requests`; a position is the number of tokens known so far."""
        return cls(
            temperature=np.array([r.params.temperature for r in requests], dtype=np.float64),
            top_p=np.array([r.params.top_p for r in requests], dtype=np.float64),
            seed=np.array([r.seed for r in requests], dtype=np.uint64),
            position=np.array([r.length for r in requests], dtype=np.int64),
        )


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The splitmix64 finalizer: every input bit changes every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(
    seed: npt.NDArray[np.uint64], position: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, a function of its seed and position alone."""
    key = _mix(seed + _GOLDEN)
    bits = _mix(key + position.astype(np.uint64) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits: torch.Tensor, settings: Settings) -> npt.NDArray[np.int64]:
    """Pick one token id per row of `logits` `[rows, vocabulary]`; the logits stay as they are."""
    ids = logits.argmax(dim=-1).cpu().numpy().astype(np.int64)
    random = np.flatnonzero(settings.temperature > 0.0)
    if len(random):
        u = uniforms(settings.seed[random], settings.position[random])
        ids[random] = _sample_nucleus(
            logits[torch.as_tensor(random)],
            temperature=torch.as_tensor(settings.temperature[random]),
            top_p=torch.as_tensor(settings.top_p[random]),
            u=torch.as_tensor(u),
        ).numpy()
    return ids


def _sample_nucleus(
    logits: torch.Tensor, *, temperature: torch.Tensor, top_p: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    """Draw by inverse distribution from the smallest set of tokens with at least `top_p` mass.

    Double precision, because a running sum over 262,144 float32 probabilities drifts by more than
    the mass of most tokens.
    """
    scaled = logits.cpu().double() / temperature[:, None]
    probability, order = torch.softmax(scaled, dim=-1).sort(dim=-1, descending=True, stable=True)
    total = probability.cumsum(dim=-1)
    # A token stays while the mass before it is short of top_p, so the first one always stays.
    kept = total - probability < top_p[:, None]
    last = kept.sum(dim=-1, keepdim=True) - 1
    target = u[:, None] * total.gather(-1, last)
    pick = torch.minimum(torch.searchsorted(total, target, right=True), last)
    return order.gather(-1, pick)[:, 0]
