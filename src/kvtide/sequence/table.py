"""Page tables: one persistent int32 array a layer group, a row a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.errors import ConfigError
from kvtide.types import ABSENT, SINK, IntArray, PageArray


@dataclass(frozen=True, slots=True)
class Csr:
    """Page tables of a batch in compressed rows, as paged attention kernels take them.

    Row i's pages are `indices[indptr[i]:indptr[i + 1]]`, its last page holds `last_page_len[i]`
    tokens (0 if it has none). `first_block[i]` is the block its first page stands for: 0 unless a
    window has passed. All int32.
    """

    indptr: PageArray
    indices: PageArray
    last_page_len: PageArray
    first_block: PageArray


class PageTable:
    """Rows of page ids by block, `ABSENT` where a row has no page (behind its window, or past its
    end).

    `rows` is written in place for life: its address never changes. Pass `buffer` to have the
    engine's own int32 [max_sequences, max_blocks] array written.
    """

    __slots__ = ("block_tokens", "rows")

    def __init__(
        self,
        max_sequences: int,
        max_blocks: int,
        block_tokens: int,
        buffer: npt.NDArray[np.int32] | None,
    ) -> None:
        shape = (max_sequences, max_blocks)
        if buffer is None:
            buffer = np.empty(shape, np.int32)
        elif buffer.shape != shape or buffer.dtype != np.int32:
            raise ConfigError(
                f"table buffer is {buffer.dtype}{list(buffer.shape)}; give int32{list(shape)} or "
                "none"
            )
        buffer.fill(ABSENT)
        self.rows = buffer
        self.block_tokens = block_tokens

    def padded(self, rows: IntArray) -> PageArray:
        """Copy of `rows` in which every absent entry names the sink page: safe for any kernel to
        read.
        """
        table = self.rows[rows]
        table[table == ABSENT] = SINK
        return table

    def csr(self, rows: IntArray, lengths: IntArray) -> Csr:
        """Compressed rows of the sequences at `rows`, whose pages cover `lengths` tokens each."""
        size = self.block_tokens
        blocks = -(-lengths // size)
        width = int(blocks.max()) if len(blocks) else 0
        table = self.rows[rows, :width]
        held = (table != ABSENT) & (np.arange(width) < blocks[:, None])
        counts = held.sum(axis=1)
        indptr = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=indptr[1:])
        last = np.where(counts > 0, lengths - (blocks - 1) * size, 0).astype(np.int32)
        first = np.where(counts > 0, held.argmax(axis=1), blocks) if width else blocks
        return Csr(indptr, table[held], last, first.astype(np.int32))
