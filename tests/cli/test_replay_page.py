"""The page of a comparison: well-formed, self-contained, the numbers in it, and what it draws."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.cli.browser import browser
from tests.cli.replay_runs import GB, comparison, run, silent, worked_example

from kvtide.cli.replay import curves
from kvtide.cli.replay.carpark import HEIGHT, draw_park
from kvtide.cli.replay.curves import LEFT, RIGHT, TOP, WIDTH, Frame, Line, draw_lines
from kvtide.cli.replay.page import draw_page, recent_hits, strict_json

if TYPE_CHECKING:
    from pathlib import Path

    from kvtide.cli.replay.metrics import Comparison

XHTML = "{http://www.w3.org/1999/xhtml}"


def text_of(page: str) -> str:
    return " ".join(" ".join(ElementTree.fromstring(page).itertext()).split())


def test_the_numbers_are_on_the_page() -> None:
    text = text_of(draw_page(worked_example()))
    for words in (
        "gqa-indexer on conversation & code: 50 requests",
        "leaves 5.000 GB (8.3 %) stranded on average",
        "hit rate 31.2 % 36.0 % 36.6 %",
        "static , 60.000 GB: 8.3 % stranded and 1.0 % dead on average, 0 granules moved",
        "2,410 granules moved",
        "static full 120 321 45 static indexer 0 0 0",
        "hardware h100",
        "elastic p99: 7.000 s 7.000 s",
    ):
        assert words in text


def test_the_best_that_can_be_run_is_bold() -> None:
    root = ElementTree.fromstring(draw_page(worked_example()))
    (table,) = [t for t in root.iter(f"{XHTML}table") if "compared" in t.attrib["class"]]
    bold = {
        "".join(row[0].itertext()): [number for number, cell in enumerate(row) if cell.attrib]
        for row in table.iter(f"{XHTML}tr")
    }
    assert bold["hit rate"] == [2]
    assert bold["refusals by indexer"] == [1]
    assert bold["granules moved"] == bold["throughput, tokens/s"] == []


PAGES = {
    "three": worked_example,
    "one": lambda: comparison(run("elastic")),
    "nothing answered": lambda: comparison(silent("static"), silent("elastic")),
}


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_well_formed_and_needs_nothing_else(name: str) -> None:
    made = PAGES[name]()
    page = draw_page(made)
    root = ElementTree.fromstring(page)
    tags = {element.tag.removeprefix(XHTML) for element in root.iter()}
    assert not tags & {"script", "link", "img", "iframe"}
    assert re.findall(r"https?://[^\"\s<]*", page) == ["http://www.w3.org/1999/xhtml"]
    assert "nan" not in re.findall(r'="[^"]*"', page)
    assert "prefers-color-scheme: dark" in page
    assert numbers_of(root) == [strict_json(expected(one)) for one in made.runs]


def numbers_of(root: ElementTree.Element) -> list[dict[str, object]]:
    text = root.findall(f".//{XHTML}pre")[-1].text
    assert text is not None
    assert "NaN" not in text
    return json.loads(text)


def expected(one: object) -> dict[str, object]:
    data: dict[str, object] = one.to_json()  # pyright: ignore
    del data["timeline"]
    return data


def test_the_bays_are_as_high_as_the_bytes() -> None:
    fixed = run("static")
    root = ElementTree.fromstring(draw_park(fixed, 600.0))
    bands = {band.findtext("title"): corners(band) for band in root.iter("polygon")}
    (stranded,) = [points for title, points in bands.items() if title and "stranded" in title]
    line = fixed.timeline
    # The last sample is the corner furthest to the right; the band reaches down from the budget.
    right = stranded[stranded[:, 0] == stranded[:, 0].max()]
    high = (right[:, 1].max() - right[:, 1].min()) / HEIGHT * 60 * GB
    assert high == pytest.approx(line.stranded[1, -1], rel=0.02)
    assert right[:, 1].min() == TOP
    (used,) = [points for title, points in bands.items() if title and title.startswith("full used")]
    assert used[:, 1].max() == TOP + HEIGHT
    assert used[:, 0].max() == WIDTH - RIGHT


def test_dead_bays_are_cached_ones_and_lie_below_the_free() -> None:
    fixed = run("static")
    root = ElementTree.fromstring(draw_park(fixed, 600.0))
    line, share = fixed.timeline, HEIGHT / (60 * GB)
    heights = {}
    for band in root.iter("polygon"):
        points = corners(band)
        last = points[points[:, 0] == points[:, 0].max()][:, 1]
        title = (band.findtext("title") or "").partition(":")[0]
        heights[title] = last.max() - last.min()
    dead = line.dead[1, -1] * share
    assert heights["indexer dead"] == pytest.approx(dead, abs=0.11)
    assert heights["indexer cached"] == pytest.approx(line.cached[1, -1] * share - dead, abs=0.11)


def test_bands_of_a_pool_end_where_the_next_begins() -> None:
    moved = run("elastic")
    root = ElementTree.fromstring(draw_park(moved, 600.0))
    heights = []
    for band in root.iter("polygon"):
        points = corners(band)
        last = points[points[:, 0] == points[:, 0].max()][:, 1]
        heights.append((last.min(), last.max()))
    assert heights[0][1] == TOP + HEIGHT
    for (top, _), (_, bottom) in pairwise(heights):
        assert bottom == pytest.approx(top, abs=0.11)
    assert heights[-1][0] == pytest.approx(TOP, abs=0.11)


def corners(polygon: ElementTree.Element) -> np.ndarray:
    return np.array([[float(n) for n in p.split(",")] for p in polygon.attrib["points"].split()])


def test_curves_pass_through_their_values() -> None:
    frame = Frame(span=10.0, top=4.0, height=100, show=str, label="a & b")
    line = Line(name="<x>", time=np.array([0.0, 5.0, 10.0]), values=np.array([np.nan, 2.0, 4.0]))
    svg = ElementTree.fromstring(draw_lines([line], frame))
    (curve,) = svg.iter("polyline")
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    assert curve.attrib["points"] == f"{middle:.1f},{TOP + 50:.1f} {WIDTH - RIGHT:.1f},{TOP:.1f}"
    assert curve.findtext("title") == "<x>"
    labels = [text.text for text in svg.iter("text")]
    assert labels == ["0.0", "2.0", "4.0", *(f"{n} s" for n in range(0, 11, 2))]


@pytest.mark.parametrize(
    ("span", "last"),
    [(0.5, "0.5 s"), (100, "100 s"), (240, "240 s"), (600, "10 min"), (9e4, "24 h")],
)
def test_time_is_told_in_one_unit(span: float, last: str) -> None:
    frame = Frame(span=span, top=1.0, height=10, show=str, label="")
    labels = [
        text.text or "" for text in ElementTree.fromstring(draw_lines([], frame)).iter("text")
    ]
    assert labels[-1] == last
    assert len({label.split()[-1] for label in labels[3:]}) == 1
    assert 3 <= len(labels[3:]) <= 10


def test_long_runs_make_no_long_pages() -> None:
    time = np.linspace(0, 1, 100_000)
    frame = Frame(span=1.0, top=1.0, height=10, show=str, label="")
    svg = ElementTree.fromstring(draw_lines([Line(name="", time=time, values=time)], frame))
    (curve,) = svg.iter("polyline")
    assert len(curve.attrib["points"].split()) == curves.COLUMNS
    assert curve.attrib["points"].endswith(f"{WIDTH - RIGHT:.1f},{TOP:.1f}")


@pytest.mark.parametrize(
    ("value", "top"), [(0, 1), (1, 1), (1.5, 2), (3, 5), (7, 10), (0.02, 0.02), (41, 50)]
)
def test_scales_end_at_round_numbers(value: float, top: float) -> None:
    assert curves.nice(value) == pytest.approx(top)


def test_the_recent_hit_rate_is_that_of_the_last_tenth() -> None:
    steady = recent_hits(run("static", hits=0.3))
    assert np.isnan(steady[0])
    assert steady[1:] == pytest.approx(0.3, abs=0.001)

    made = run("static")
    late = np.maximum(0, made.timeline.prompt_tokens - 500_000)
    rates = recent_hits(replace(made, timeline=replace(made.timeline, hit_tokens=late)))
    asked = made.timeline.prompt_tokens / 1_000_000
    assert (rates[1:][asked[1:] < 0.5] == 0).all()
    assert rates[asked > 0.61] == pytest.approx(1.0)
    assert rates[np.searchsorted(asked, 0.55)] == pytest.approx(0.5, abs=0.05)


def asked_for(page: Comparison, folder: Path) -> Path:
    path = folder / "page.html"
    path.write_text(draw_page(page), encoding="utf-8")
    return path


def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    path = asked_for(worked_example(), tmp_path)
    with browser(tmp_path) as page:
        size = {"width": 1000, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        page.open(path)
        assert [one["request"]["url"] for one in page.of("Network.requestWillBeSent")] == [
            path.resolve().as_uri()
        ]
        assert page.of("Runtime.exceptionThrown") == page.of("Log.entryAdded") == []
        assert page.evaluate("document.title").startswith("gqa-indexer: static, elastic, infinite")
        # Every picture has a size, and nothing sticks out of the page.
        boxes = page.evaluate(
            "[...document.querySelectorAll('svg[role=img]')].map(it => {"
            "const b = it.getBoundingClientRect(); return [b.left, b.right, b.height]})"
        )
        assert len(boxes) == 3 + 3 + 3
        assert all(left >= 0 and right <= 1000 and height > 50 for left, right, height in boxes)
        assert page.evaluate("document.documentElement.scrollWidth") <= 1000
        texts = page.evaluate(
            "[...document.querySelectorAll('svg[role=img] text')].map(it => {"
            "const b = it.getBoundingClientRect(), s = it.ownerSVGElement.getBoundingClientRect();"
            "return [it.textContent, b.left >= s.left - 1 && b.right <= s.right + 1]})"
        )
        assert len(texts) > 50
        assert [text for text, is_inside in texts if not is_inside] == []
        filled = "getComputedStyle(document.querySelector('polygon.p0.used')).fill"
        assert page.evaluate(filled) == "rgb(37, 99, 235)"


def test_a_browser_shows_it_dark(tmp_path: Path) -> None:
    path = asked_for(worked_example(), tmp_path)
    paper = "getComputedStyle(document.body).backgroundColor"
    with browser(tmp_path) as page:
        colours = []
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            page.call("Emulation.setEmulatedMedia", features=[feature])
            page.open(path)
            colours.append(page.evaluate(paper))
    assert colours == ["rgb(255, 255, 255)", "rgb(17, 24, 39)"]
