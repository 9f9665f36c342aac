"""The life of one request: open, admitted, suspended, closed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvtide.prefix import Match, Node
    from kvtide.sequence.rows import Rows
    from kvtide.types import IntArray, Origin, Scope, TokenArray


class Status(Enum):
    """Where a sequence is in its life. Only an admitted one holds pages."""

    OPEN = "open"
    ADMITTED = "admitted"
    SUSPENDED = "suspended"
    CLOSED = "closed"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's handle. Read it; only the manager (and a graph guard) changes it.

    tokens:  |<- committed: matchable ->|<- computed: KV exists ->|<- known, to be computed ->|
    `computed <= length` and `computed <= capacity` always. While not admitted nothing is computed.
    """

    scope: Scope
    priority: int
    origin: Origin
    prompt_tokens: int
    row: int = -1
    stay: int = 0
    """Counts up with every admission: what a step computed in an earlier stay is gone."""
    status: Status = Status.OPEN
    node: Node | None = None
    """End of the path published so far; pinned while admitted."""
    published: int = 0
    """Blocks from the root to `node`."""
    epoch: int = 0
    """Tree generation at admission; after a reset the sequence publishes nothing more."""
    match: Match | None = None
    branch: int = -1
    """Block boundary where the full-lifetime match ended beyond the usable one: worth keeping."""
    snapshots: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """State snapshots not published yet: block boundary -> page per state group."""
    restorable: int = 0
    """Tokens up to the last state on its path that stays: the match's, or a snapshot since."""
    rolling: int = -1
    """The snapshot boundary that follows decode; replaced by the next unless it is wanted."""
    peak: int = 0
    """Most tokens ever computed: what a resume computes below it is computed again."""
    registered: bool = False
    """Padding that captured graphs rely on: it keeps its row and its pages until unregistered."""
    rows: Rows | None = None
    """The arrays its numbers live in while admitted."""
    saved: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))
    """Known tokens while not admitted."""

    @property
    def hit(self) -> int:
        """Tokens of the last match: reused at admission, not computed again."""
        return 0 if self.match is None else self.match.hit

    @property
    def length(self) -> int:
        """Known tokens: the prompt and what was generated."""
        return len(self.saved) if self.rows is None else int(self.rows.length[self.row])

    @property
    def computed(self) -> int:
        """Tokens whose KV and state exist. The engine computes on from here."""
        return 0 if self.rows is None else int(self.rows.computed[self.row])

    @property
    def capacity(self) -> int:
        """Tokens that fit into the pages held."""
        return 0 if self.rows is None else int(self.rows.room[self.row])

    @property
    def tokens(self) -> TokenArray:
        """Known token ids, int32: a view, good until the sequence is suspended or closed."""
        return self.saved if self.rows is None else self.rows.tokens[self.row, : self.length]


class Batch:
    """Sequences that run together. Frozen: make a new one when the membership changes.

    `rows` are their rows in the page tables, int64, in order. Every verb that takes a batch is one
    vectorised call; `num_new` is what the last `extend` granted, None before.
    """

    __slots__ = ("_stays", "granted_in", "membership", "num_new", "rows", "sequences")

    def __init__(self, sequences: tuple[Sequence, ...], membership: int) -> None:
        self.sequences = sequences
        self.rows: IntArray = np.fromiter((s.row for s in sequences), np.int64, len(sequences))
        self._stays = [s.stay for s in sequences]
        self.num_new: IntArray | int | None = None
        self.granted_in = membership  # membership when `num_new` was granted
        self.membership = membership  # of the ledger when the rows were last known to be right

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequences)

    def present(self) -> list[bool]:
        """Which sequences still are in the stay this batch knows them in."""
        known = zip(self.sequences, self._stays, strict=True)
        return [s.row >= 0 and s.stay == stay for s, stay in known]

    def only(self, here: npt.NDArray[np.bool_]) -> Batch:
        """A batch of those that are `here`, with their grants; this one's grants end."""
        rest = Batch(tuple(compress(self.sequences, here.tolist())), self.membership)
        granted, self.num_new = self.num_new, None
        rest.num_new = granted[here] if isinstance(granted, np.ndarray) else granted
        return rest
