"""The forward in progress: page indices computed once per group, scratch memory, state pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from kvtide.errors import ConfigError, UsageError
from kvtide.layout import Window
from kvtide.torch.convert import tensor_of
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from kvtide.layout import LayerGroup
    from kvtide.torch.forward import Forward
    from kvtide.torch.layers import PagedStateLayer
    from kvtide.torch.views import Grid, StatePages, TokenRows
    from kvtide.types import IntArray, PageArray


class HasRows(Protocol):
    """A page table: persistent int32 [max_sequences, blocks], -1 where there is no page."""

    @property
    def rows(self) -> PageArray:
        """The table itself, not a copy."""
        ...


class TokenGroup:
    """A group of token pages and where the tokens of the forward in progress are."""

    def __init__(self, group: LayerGroup, table: HasRows) -> None:
        self.window: int | None = None
        if isinstance(group.lifetime, Window):
            if group.lifetime.sinks:
                raise ConfigError(
                    f"group {group.name!r} keeps {group.lifetime.sinks} sink tokens; "
                    "transformers' masks cannot show them, use sinks = 0"
                )
            self.window = group.lifetime.tokens
        self._block_tokens = group.block_tokens
        self._table = table
        self._forward: Forward | None = None
        self._places: tuple[IntArray, IntArray] | None = None
        self._rows: IntArray = np.zeros(0, np.int64)
        self._index: dict[Grid, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, forward: Forward, rows: IntArray) -> None:
        """Forget the last forward; indices of this one are computed when first wanted."""
        self._forward, self._rows, self._places = forward, rows, None
        self._index.clear()

    def read_index(self, grid: Grid) -> torch.Tensor:
        """Units of all visible tokens, int64 [batch * width * row_units]."""
        return self._indices(grid)[0]

    def write_index(self, grid: Grid) -> torch.Tensor:
        """Units of the new tokens, int64 [sum(num_new) * row_units]."""
        return self._indices(grid)[1]

    def _indices(self, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
        if grid not in self._index:
            self._index[grid] = self._compute(grid)
        return self._index[grid]

    def _compute(self, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
        forward = self._forward
        if forward is None:
            raise UsageError("no forward is bound; call the model inside `with cache.bind(...)`")
        if self._places is None:
            width = forward.width(self.window)
            num_blocks = ceil_div(forward.length, self._block_tokens)
            table = self._table.rows[self._rows, :num_blocks]
            self._places = forward.pages(table, width, self._block_tokens)
        pages, offsets = self._places
        units = pages * grid.page_units + offsets * grid.row_units
        new = units[:, -forward.num_queries :]
        fresh = new.reshape(-1) if forward.is_even else new[forward.is_new()]
        return _expand(units.reshape(-1), grid), _expand(fresh, grid)


def _expand(tokens: IntArray, grid: Grid) -> torch.Tensor:
    """First unit of each token -> every unit of each token."""
    if grid.row_units > 1:
        tokens = (tokens[:, None] + np.arange(grid.row_units)).reshape(-1)
    return tensor_of(tokens)


class StateGroup:
    """A group of state pages, copied out before a forward and back after it."""

    def __init__(self, group: LayerGroup, table: HasRows, pages: StatePages) -> None:
        self._name = group.name
        self._table = table
        self._pages = pages
        self._at = torch.zeros(0, dtype=torch.int64)
        self._states = torch.zeros(0)
        self.layers: list[PagedStateLayer] = []

    def begin(self, forward: Forward, rows: IntArray) -> None:
        """Copy the states of the rows out, or start blank ones if nothing is computed yet."""
        if not forward.is_even:
            raise UsageError(
                f"group {self._name!r} holds state: all sequences of a forward must compute "
                f"equally many tokens, got {forward.num_new}; run them one by one"
            )
        self._at = tensor_of(self._table.rows[rows, 0].astype(np.int64))
        if forward.is_fresh:
            self._states = self._pages.blank(forward.batch_size)
        else:
            self._states = self._pages.read(self._at)
        for layer in self.layers:
            layer.attach(self._states, is_started=not forward.is_fresh)

    def write_back(self) -> None:
        """Make what the layers left in the copies the state of the sequences."""
        self._pages.write(self._at, self._states)

    def end(self) -> None:
        """Take the copies away from the layers."""
        for layer in self.layers:
            layer.detach()
        self._states = torch.zeros(0)


class Scratch:
    """Reused memory for what layers return, one piece per role and dtype; grows, never shrinks.

    A fresh tensor per layer would miss the processor's caches and fault in new memory every time;
    reuse made gather and attention about 2.5 times faster on a CPU.
    """

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, role: str, dtype: torch.dtype, num_elements: int) -> torch.Tensor:
        """A flat tensor of at least this size, valid until the same role is taken again."""
        key = (role, dtype)
        piece = self._pieces.get(key)
        if piece is None or piece.numel() < num_elements:
            with torch.inference_mode(mode=False):
                piece = torch.empty(num_elements + num_elements // 4, dtype=dtype)
            self._pieces[key] = piece
        return piece[:num_elements]


class Binding:
    """What the layers of a cache share: the forward in progress and the memory it works in."""

    def __init__(self, tokens: dict[str, TokenGroup], states: dict[str, StateGroup]) -> None:
        self.tokens = tokens
        self.states = states
        self.idle_length = 0
        self._scratch = Scratch()
        self._forward: Forward | None = None

    @property
    def forward(self) -> Forward:
        """The forward in progress; UsageError if there is none."""
        if self._forward is None:
            raise UsageError("no forward is bound; call the model inside `with cache.bind(...)`")
        return self._forward

    @property
    def is_open(self) -> bool:
        """Whether a forward is in progress."""
        return self._forward is not None

    @property
    def past(self) -> int:
        """Columns before the new tokens of this forward, or `idle_length` between forwards."""
        return self.idle_length if self._forward is None else self._forward.past

    def begin(self, forward: Forward, rows: IntArray) -> None:
        """Start a forward over these table rows; UsageError if one is in progress."""
        if self._forward is not None:
            raise UsageError("a forward is bound already; leave its `with cache.bind(...)` first")
        for group in (*self.tokens.values(), *self.states.values()):
            group.begin(forward, rows)
        self._forward = forward

    def commit(self) -> None:
        """Write the states back; token pages were written as the layers went."""
        for group in self.states.values():
            group.write_back()

    def end(self) -> None:
        """Leave the forward, whatever became of it."""
        for group in self.states.values():
            group.end()
        self._forward = None

    def write(self, group: TokenGroup, rows: TokenRows, tokens: torch.Tensor) -> None:
        """Write [batch * num_queries, elements] new tokens; padding columns are left out."""
        forward = self.forward
        self._require_shape(rows, tokens)
        if not forward.is_even:
            tokens = tokens[tensor_of(forward.is_new().reshape(-1))]
        rows.write(group.write_index(rows.grid), tokens)

    def read(self, group: TokenGroup, rows: TokenRows, role: str) -> torch.Tensor:
        """All visible tokens, [batch * width, elements], in scratch memory of this role."""
        num_tokens = self.forward.batch_size * self.forward.width(group.window)
        out = self._scratch.take(role, rows.dtype, num_tokens * rows.row_elements)
        return rows.read(group.read_index(rows.grid), out.view(num_tokens, rows.row_elements))

    def _require_shape(self, rows: TokenRows, tokens: torch.Tensor) -> None:
        forward = self.forward
        want = (forward.batch_size * forward.num_queries, rows.row_elements)
        if tuple(tokens.shape) != want:
            raise UsageError(
                f"the model wrote tokens and elements {tuple(tokens.shape)}, but the bound forward "
                f"and the layout say {want}; bind the sequences of this batch, and build the "
                "layout from this model"
            )
        if tokens.dtype != rows.dtype:
            raise ConfigError(
                f"the model writes {tokens.dtype}, the layout stores {rows.dtype}; "
                "build the layout with the model's dtype"
            )
        if tokens.requires_grad:
            raise UsageError("a paged cache keeps no gradients; call the model in torch.no_grad()")
