"""One step in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvtide.pool import Fence
    from kvtide.sequence.copies import PageCopy
    from kvtide.sequence.sequence import Batch
    from kvtide.types import IntArray


@dataclass(slots=True)
class Step:
    """One step in flight, from `KVManager.step`.

    `starts` are the computed tokens of each sequence before the step, `copies` the page copies that
    ran on entry (an engine with its own buffers carries them out itself). Set `fence` to something
    with `done()` if the device is not finished when the `with` block ends.
    """

    number: int
    batch: Batch
    starts: IntArray
    copies: tuple[PageCopy, ...]
    fence: Fence | None = None

    @property
    def num_new(self) -> IntArray:
        """Tokens each sequence computes in this step, int64."""
        granted = self.batch.num_new
        counts = np.asarray(0 if granted is None else granted, np.int64)
        return np.broadcast_to(counts, self.batch.rows.shape)
