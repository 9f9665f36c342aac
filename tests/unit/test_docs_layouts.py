"""The code of docs/layouts.md runs as it stands, and its table of bytes is what layouts have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.configs import GLM_5, config

from kvtide import Layout

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"


def test_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GLM_5, "num_nextn_predict_layers": 1}))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = [_run(block)["layout"].groups for block in blocks]
    assert [[group.name for group in groups] for groups in names] == [
        ["latent", "indexer"],
        ["full", "window_512"],
    ]


def _run(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_table_of_dtypes() -> None:
    rows = re.findall(r"^\| `(int\d|nvfp4|fp8)`[^|]*\| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    assert [dtype for dtype, _ in rows] == ["fp8", "int8", "int4", "nvfp4"]
    for dtype, num_bytes in rows:
        fields = config("qwen3", num_hidden_layers=1, head_dim=128)
        layout = Layout.from_config(fields, block_tokens=16, kv_dtype=dtype)
        assert layout.bytes_per_token == 2 * 8 * int(num_bytes)
