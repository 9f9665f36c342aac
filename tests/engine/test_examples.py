"""The examples run."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING

from ..cli.small import loaded

if TYPE_CHECKING:
    import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_generate(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLES / "generate.py"))["main"]
    texts = main(loaded())
    assert [len(text) for text in texts] == [32] * 3
    assert "[length] def factorial(n):" in capsys.readouterr().out
