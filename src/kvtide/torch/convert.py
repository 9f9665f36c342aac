"""The one place where numpy arrays become tensors: torch's stub for it is untyped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

_from_numpy = cast(
    "Callable[[npt.NDArray[Any]], torch.Tensor]",
    torch.from_numpy,  # pyright: ignore[reportUnknownMemberType]
)


def tensor_of(array: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor over the array's memory (a contiguous copy if it is not contiguous)."""
    return _from_numpy(np.ascontiguousarray(array))
