"""Text grows piece by piece, never shrinks, and never shows a stop string."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.engine.detokenize import Detokenizer, find_stop, held_back

if TYPE_CHECKING:
    from collections.abc import Sequence


def decode_bytes(tokens: Sequence[int]) -> str:
    """A vocabulary of single bytes: characters arrive in pieces."""
    return bytes(tokens).decode("utf-8", errors="replace")


def decode_words(tokens: Sequence[int]) -> str:
    """A vocabulary of words that drops the space at the start of a text, as SentencePiece does."""
    return " ".join(f"w{token}" for token in tokens)


def run(text: str, stops: Sequence[str]) -> tuple[list[str], Detokenizer]:
    """Push the bytes of `text` until a stop or the end."""
    detokenizer = Detokenizer(decode_bytes, context=b"so: ", stops=stops)
    deltas: list[str] = []
    for token in text.encode():
        deltas.append(detokenizer.push(token))
        if detokenizer.stopped_by is not None:
            break
    deltas.append(detokenizer.flush())
    return deltas, detokenizer


def until_stop(text: str, stops: Sequence[str]) -> str:
    """The naive rule: cut at the first character at which the text so far holds a stop string."""
    for end in range(len(text) + 1):
        places = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if places:
            return text[: min(places)]
    return text


@given(
    text=st.text(st.sampled_from("abcé漢🙂 \n"), max_size=30),
    stops=st.lists(st.text(st.sampled_from("abcé🙂"), min_size=1, max_size=4), max_size=3),
)
def test_deltas_add_up_to_the_text_before_the_stop(text: str, stops: list[str]) -> None:
    deltas, detokenizer = run(text, stops)
    assert "".join(deltas) == detokenizer.text == until_stop(text, stops)
    assert (detokenizer.stopped_by is None) == (until_stop(text, stops) == text)


def test_characters_come_whole() -> None:
    deltas, _ = run("é🙂", ())
    assert deltas == ["", "é", "", "", "", "🙂", ""]


def test_what_may_become_a_stop_string_is_held_back_until_it_does_not() -> None:
    deltas, detokenizer = run("a<en<end>x", ("<end>",))
    assert deltas == ["a", "", "", "", "<en", "", "", "", "", ""]
    assert detokenizer.stopped_by == "<end>"
    assert detokenizer.text == "a<en"


def test_an_incomplete_stop_string_is_given_out_at_the_end() -> None:
    deltas, detokenizer = run("ab", ("bc",))
    assert deltas == ["a", "", "b"]
    assert detokenizer.stopped_by is None


def test_a_broken_character_is_given_out_at_the_end() -> None:
    detokenizer = Detokenizer(decode_bytes, context=(), stops=())
    assert detokenizer.push(0xF0) == ""
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"


def test_spaces_follow_from_the_prompt() -> None:
    detokenizer = Detokenizer(decode_words, context=(1, 2), stops=())
    assert [detokenizer.push(3), detokenizer.push(4), detokenizer.flush()] == [" w3", " w4", ""]


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("abc", ("c", "bc"), (1, "bc")),
        ("abc", ("ab", "abc"), (0, "abc")),
        ("abc", ("x",), None),
        ("abab", ("ab",), (2, "ab")),
    ],
)
def test_find_stop(text: str, stops: tuple[str, ...], expected: tuple[int, str] | None) -> None:
    assert find_stop(text, stops, 1 if text == "abab" else 0) == expected


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [("xab", ("abc",), 2), ("xa", ("abc", "xay"), 2), ("abc", ("abc",), 0), ("", ("a",), 0)],
)
def test_held_back(text: str, stops: tuple[str, ...], expected: int) -> None:
    assert held_back(text, stops) == expected
