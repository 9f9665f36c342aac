"""The forward in progress: page indices computed once per group, state pages copied out and in."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from kvtide.errors import ConfigError, UsageError
from kvtide.layout import Window
from kvtide.torch.convert import tensor_of
from kvtide.types import ceil_div

if TYPE_CHECKING:
    from kvtide.layout import LayerGroup
    from kvtide.torch.forward import Forward
    from kvtide.torch.scratch import Scratch
    from kvtide.torch.views import Grid, StatePages, TokenRows, TokenShape
    from kvtide.types import IntArray, PageArray

UNBOUND = "no forward is bound; call the model inside `with cache.bind(...)`"


class HasRows(Protocol):
    """A page table: persistent int32 [max_sequences, blocks], -1 where there is no page."""

    @property
    def rows(self) -> PageArray:
        """The table itself, not a copy."""
        ...


class HasState(Protocol):
    """A cache layer that keeps a state."""

    def attach(self, states: torch.Tensor, *, is_started: bool) -> None:
        """Look into `states` [batch, page_bytes] for the forward that begins."""
        ...

    def detach(self) -> None:
        """Let go of them."""
        ...


class Places(NamedTuple):
    """Unit indices of one grid, int64: all visible entries, and the new ones among them."""

    visible: torch.Tensor
    new: torch.Tensor


class TokenGroup:
    """A group of token pages, and where the entries of the forward in progress are.

    An entry is a token, or what stands for `ratio` tokens. Everything that the layers of the group
    have in common is computed once a forward.
    """

    def __init__(self, group: LayerGroup, table: HasRows, scratch: Scratch) -> None:
        self.window: int | None = None
        if isinstance(group.lifetime, Window):
            if group.lifetime.sinks:
                raise ConfigError(
                    f"group {group.name!r} keeps {group.lifetime.sinks} sink tokens; "
                    "transformers' masks cannot show them, use sinks = 0"
                )
            self.window = group.lifetime.tokens
        self.ratio = group.ratio
        self._entries = group.entries
        self._table = table
        self._scratch = scratch
        self._forward: Forward | None = None
        self._rows: IntArray = np.zeros(0, np.int64)
        self._cells: tuple[IntArray, IntArray] | None = None
        self._places: dict[Grid, Places] = {}
        self._targets: dict[tuple[str, TokenShape], tuple[torch.Tensor, torch.Tensor]] = {}
        self._epoch = 0

    def begin(self, forward: Forward, rows: IntArray) -> None:
        """Start a forward over these table rows; indices are computed when first wanted."""
        self._forward = forward if self.ratio == 1 else forward.folded(self.ratio)
        self._rows = rows

    def end(self) -> None:
        """Forget the forward."""
        self._forward = self._cells = None
        self._places.clear()
        self._targets.clear()

    def write(self, rows: TokenRows, entries: torch.Tensor) -> None:
        """Write new entries [batch * new, elements]; padding columns are left out."""
        forward = self._bound()
        _require_fitting(forward, rows, entries)
        if not forward.is_even:
            entries = entries[tensor_of(forward.is_new().reshape(-1))]
        if len(entries):
            rows.write(self._places_in(rows.grid).new, entries)

    def read(self, rows: TokenRows, role: str, *, heads: bool) -> torch.Tensor:
        """All visible entries, [batch, width, dim], or with `heads` [batch, heads, width, dim].

        They lie in the scratch memory of this role, until it is read into again; if somebody still
        holds the returned tensor then, the memory is theirs.
        """
        if self._epoch != self._scratch.reclaim(role, rows.shape.dtype):
            self._targets.clear()
        key = (role, rows.shape)
        if key not in self._targets:
            self._targets[key] = self._target(rows, role)
            self._epoch = self._scratch.epoch
        units, shaped = self._targets[key]
        rows.read(self._places_in(rows.grid).visible, units)
        if shaped.dim() == 4:
            found = shaped.transpose(1, 2)
        else:
            found = shaped.unsqueeze(1) if heads else shaped.view(shaped.shape)
        self._scratch.lend(role, rows.shape.dtype, found)
        return found

    def _target(self, rows: TokenRows, role: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Scratch memory for all visible entries: as units, and as [batch, width, *shape]."""
        forward = self._bound()
        batch, width = forward.batch_size, forward.width(self.window)
        flat = self._scratch.take(role, rows.shape.dtype, batch * width * rows.shape.num_elements)
        return flat.view(-1, rows.unit_elements), flat.view(batch, width, *rows.shape.sizes)

    def _places_in(self, grid: Grid) -> Places:
        if grid not in self._places:
            self._places[grid] = self._compute(grid)
        return self._places[grid]

    def _compute(self, grid: Grid) -> Places:
        forward = self._bound()
        if self._cells is None:
            num_blocks = ceil_div(forward.length, self._entries)
            table = self._table.rows[self._rows, :num_blocks]
            self._cells = forward.pages(table, forward.width(self.window), self._entries)
        pages, offsets = self._cells
        units = pages * grid.page_units + offsets * grid.row_units
        new = units[:, units.shape[1] - forward.num_queries :]
        fresh = new.reshape(-1) if forward.is_even else new[forward.is_new()]
        return Places(_expand(units.reshape(-1), grid), _expand(fresh, grid))

    def _bound(self) -> Forward:
        if self._forward is None:
            raise UsageError(UNBOUND)
        return self._forward


def _expand(tokens: IntArray, grid: Grid) -> torch.Tensor:
    """First unit of each entry -> every unit of each entry."""
    if grid.row_units > 1:
        tokens = (tokens[:, None] + np.arange(grid.row_units)).reshape(-1)
    return tensor_of(tokens)


def _require_fitting(forward: Forward, rows: TokenRows, entries: torch.Tensor) -> None:
    want = (forward.batch_size * forward.num_queries, rows.shape.num_elements)
    if entries.shape != want:
        raise UsageError(
            f"the model wrote tokens and elements {tuple(entries.shape)}, but the bound forward "
            f"and the layout say {want}; bind the sequences of this batch, and build the "
            "layout from this model"
        )
    if entries.dtype != rows.shape.dtype:
        raise ConfigError(
            f"the model writes {entries.dtype}, the layout stores {rows.shape.dtype}; "
            "build the layout with the model's dtype"
        )
    if entries.requires_grad:
        raise UsageError("a paged cache keeps no gradients; call the model in torch.no_grad()")


class StateGroup:
    """A group of state pages, copied out before a forward and back after it."""

    def __init__(self, group: LayerGroup, table: HasRows, pages: StatePages) -> None:
        self._name = group.name
        self._table = table
        self.pages = pages
        self._at = torch.zeros(0, dtype=torch.int64)
        self._states = torch.zeros(0)
        self.layers: list[HasState] = []

    def begin(self, forward: Forward, rows: IntArray) -> None:
        """Copy the states of the rows out, or start blank ones if nothing is computed yet."""
        self._require_alike(forward)
        self._at = tensor_of(self._table.rows[rows, 0].astype(np.int64))
        if forward.is_fresh:
            self._states = self.pages.blank(forward.batch_size)
        else:
            self._states = self.pages.read(self._at)
        for layer in self.layers:
            layer.attach(self._states, is_started=not forward.is_fresh)

    def write_back(self) -> None:
        """Make what the layers left in the copies the state of the sequences."""
        self.pages.write(self._at, self._states)

    def end(self) -> None:
        """Take the copies away from the layers."""
        for layer in self.layers:
            layer.detach()
        self._states = torch.zeros(0)

    def _require_alike(self, forward: Forward) -> None:
        if not forward.is_even:
            raise UsageError(
                f"group {self._name!r} holds state: all sequences of a forward must compute "
                f"equally many tokens, got {forward.num_new}; run them one by one"
            )
        if forward.is_mixed:
            raise UsageError(
                f"group {self._name!r} holds state: a forward has sequences with a past, or "
                f"without one, got starts {forward.starts}; PagedCache.split tells them apart"
            )


class Binding:
    """What the layers of a cache share: the groups, and the forward in progress."""

    def __init__(self, tokens: dict[str, TokenGroup], states: dict[str, StateGroup]) -> None:
        self.tokens = tokens
        self.states = states
        self.idle_length = 0
        self.is_one_batch = False
        """Whether all forwards are of one batch, whose padding counts as tokens."""
        self.current: Forward | None = None

    @property
    def forward(self) -> Forward:
        """The forward in progress; UsageError if there is none."""
        if self.current is None:
            raise UsageError(UNBOUND)
        return self.current

    @property
    def past(self) -> int:
        """Columns before the new tokens of this forward, or `idle_length` between forwards."""
        return self.idle_length if self.current is None else self.current.past

    def begin(self, forward: Forward, rows: IntArray) -> None:
        """Start a forward over these table rows; UsageError if one is in progress."""
        if self.current is not None:
            raise UsageError("a forward is bound already; leave its `with cache.bind(...)` first")
        for group in (*self.states.values(), *self.tokens.values()):
            group.begin(forward, rows)
        self.current = forward

    def commit(self) -> None:
        """Write the states back; token pages were written as the layers went."""
        for group in self.states.values():
            group.write_back()

    def end(self) -> None:
        """Leave the forward, whatever became of it."""
        for group in (*self.states.values(), *self.tokens.values()):
            group.end()
        self.current = None
