"""Every request of every policy as one Parquet file."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtide.errors import ConfigError
from kvtide.sim.result import Requests

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvtide.sim.result import Run


def require_parquet() -> None:
    """Raise ConfigError if there is nothing to write Parquet with: before a run, not after."""
    if find_spec("pyarrow") is None:
        raise ConfigError("--parquet needs pyarrow; run: pip install 'kvtide[parquet]'")


def write_parquet(runs: Sequence[Run], path: Path) -> None:
    """Write a row a request: policy, number, and the fields of `Requests`. Times in seconds."""
    arrow: Any = import_module("pyarrow")
    names = [field.name for field in fields(Requests)]
    counts = [len(run.requests.arrival) for run in runs]
    columns: dict[str, Any] = {
        "policy": np.repeat([run.policy for run in runs], counts),
        "request": np.concatenate([np.arange(count) for count in counts]),
        **{name: np.concatenate([getattr(run.requests, name) for run in runs]) for name in names},
    }
    try:
        import_module("pyarrow.parquet").write_table(arrow.table(columns), path)
    except OSError as error:
        raise ConfigError(f"--parquet {path} cannot be written: {error.strerror}") from error
