"""Tensors over the pages of a pool, without a copy. Only mapped pages may be read or written."""

from __future__ import annotations

from math import gcd, prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from kvtide.layout import Buffer, LayerGroup
    from kvtide.memory import Arena

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
"""The torch dtype of every dtype a layout knows."""


class HasArena(Protocol):
    """A pool as far as its bytes go."""

    @property
    def arena(self) -> Arena:
        """Where the pages are; page p starts at byte `p * page_bytes`."""
        ...


def bytes_of(pool: HasArena) -> torch.Tensor:
    """All bytes of a pool's reservation as uint8 [n]; touches none of them.

    Valid until the arena is closed, whatever is mapped or unmapped meanwhile. A read or write of
    an unmapped page faults. Not an inference tensor, so it may be written in or out of that mode.
    """
    with torch.inference_mode(mode=False):
        return torch.frombuffer(pool.arena.buffer(), dtype=torch.uint8)


def page_view(pool: HasArena, group: LayerGroup, *, layer_position: int, name: str) -> torch.Tensor:
    """One buffer of one layer over all pages of the reservation.

    Shape `[pages, entries, *shape]` (an entry is a token, or what stands for `group.ratio` of
    them), or `[pages, *shape]` in a state group. Every page that fits the reservation has a row,
    mapped or not. Raises ConfigError for an unknown buffer.
    """
    buffer = buffer_named(group, name)
    flat = bytes_of(pool).view(DTYPES[buffer.dtype])
    item = flat.element_size()
    inner = buffer.shape if group.is_state else (group.entries, *buffer.shape)
    stride = [prod(inner[axis + 1 :]) for axis in range(len(inner))]
    num_pages = flat.numel() * item // group.page_bytes
    with torch.inference_mode(mode=False):
        return flat.as_strided(
            (num_pages, *inner),
            (group.page_bytes // item, *stride),
            group.offset(layer_position, name) // item,
        )


def buffer_named(group: LayerGroup, name: str) -> Buffer:
    """The buffer of that name; ConfigError if the group has none."""
    for buffer in group.buffers:
        if buffer.name == name:
            return buffer
    known = ", ".join(buffer.name for buffer in group.buffers)
    raise ConfigError(f"group {group.name!r} has no buffer {name!r}; it has {known}")


class Grid(NamedTuple):
    """How the tokens of one buffer lie in a pool, counted in equal units of whole elements.

    A unit is what one index moves: a token's row, if the page is a whole number of rows (the usual
    case, `row_units == 1`), else their greatest common divisor. Buffers with equal grids share
    their indices.
    """

    page_units: int
    row_units: int


class TokenShape(NamedTuple):
    """What one token is in a buffer; buffers with equal shapes share their scratch memory."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Elements of one token."""
        return prod(self.sizes)


class TokenRows:
    """One buffer of one layer as rows of tokens, read and written by unit index.

    Over a 2-D contiguous view, so that one `index_select` copies whole rows: three to four times
    faster on a CPU than indexing `[page, offset]`, and as fast as copying whole pages.
    """

    def __init__(
        self, pool: HasArena, group: LayerGroup, *, layer_position: int, name: str
    ) -> None:
        buffer = buffer_named(group, name)
        flat = bytes_of(pool).view(DTYPES[buffer.dtype])
        item = flat.element_size()
        unit_bytes = gcd(buffer.bytes, group.page_bytes)
        start = group.offset(layer_position, name) // item
        self.grid = Grid(group.page_bytes // unit_bytes, buffer.bytes // unit_bytes)
        self.shape = TokenShape(buffer.shape, flat.dtype)
        self.unit_elements = unit_bytes // item
        with torch.inference_mode(mode=False):
            rows = (flat.numel() - start) // self.unit_elements
            units = flat[start : start + rows * self.unit_elements]
            self._units = units.view(rows, self.unit_elements)

    def read(self, index: torch.Tensor, out: torch.Tensor) -> None:
        """Copy units `index` (int64 [n]) into `out` [n, unit_elements]."""
        torch.index_select(self._units, 0, index, out=out)

    def write(self, index: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write `tokens` [m, elements] as the units `index` (int64 [m * row_units], no doubles)."""
        if self.grid.row_units > 1:
            tokens = tokens.reshape(-1, self.unit_elements)
        self._units.index_copy_(0, index, tokens)


class StatePages:
    """The pages of a state group, read and written whole: all layers of a sequence at once."""

    def __init__(self, pool: HasArena, group: LayerGroup) -> None:
        self._group = group
        raw = bytes_of(pool)
        num_pages = raw.numel() // group.page_bytes
        self._pages = raw[: num_pages * group.page_bytes].view(num_pages, group.page_bytes)

    def read(self, pages: torch.Tensor) -> torch.Tensor:
        """A copy of these pages, uint8 [n, page_bytes]; `pages` int64 [n]."""
        return self._pages.index_select(0, pages)

    def write(self, pages: torch.Tensor, states: torch.Tensor) -> None:
        """Write back what `read` returned, changed or not; `pages` int64 [n], without doubles."""
        self._pages.index_copy_(0, pages, states)

    def blank(self, num_sequences: int) -> torch.Tensor:
        """Zero states, uint8 [n, page_bytes]: what a sequence with nothing computed has."""
        return self._pages.new_zeros((num_sequences, self._group.page_bytes))

    def part(self, states: torch.Tensor, layer_position: int, name: str) -> torch.Tensor:
        """One buffer of one layer inside `states`: a view [n, *shape], writable in place."""
        buffer = buffer_named(self._group, name)
        start = self._group.offset(layer_position, name)
        piece = states[:, start : start + buffer.bytes].view(DTYPES[buffer.dtype])
        return piece.view(len(states), *buffer.shape)
