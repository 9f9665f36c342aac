"""The table of models in the documentation is what its command writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TABLE = Path(__file__).parents[2] / "docs" / "models" / "table.py"


def test_table_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, str(TABLE), "--check"], check=False)
    assert done.returncode == 0, f"run: python {TABLE.name}"
