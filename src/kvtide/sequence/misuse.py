"""Verbs called on sequences in the wrong state: refused before anything is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from kvtide.sequence.sequence import Sequence, Status


def require(seq: Sequence, *allowed: Status) -> None:
    """Raise UsageError unless the sequence is in one of the `allowed` states."""
    if seq.status not in allowed:
        names = " or ".join(status.value for status in allowed)
        raise UsageError(f"the sequence is {seq.status.value}; this needs one that is {names}")


def require_all(sequences: Seq[Sequence], *allowed: Status) -> None:
    """`require` for each of them; UsageError as well if one is named twice."""
    if len(set(sequences)) != len(sequences):
        raise UsageError("a sequence is named twice; give each once")
    for seq in sequences:
        require(seq, *allowed)


def require_unregistered(sequences: Seq[Sequence]) -> None:
    """Raise UsageError if captured graphs rely on the row and the pages of one of them."""
    for seq in sequences:
        if seq.registered:
            raise UsageError(
                f"the sequence in row {seq.row} is padding that captured graphs rely on; begin_step"
                " fills rows with it, and it stays as it is; unregister it through the handle that "
                "register_padding returned if it has to go"
            )
