"""The HTML page: well-formed, self-contained, with the numbers of the plan in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from kvtide.cli.app import app
from kvtide.cli.charts import BARS, LABEL, LETTERS, NOTE, STRANDED, Row, Segment, bars
from kvtide.cli.plan.page import draw_page
from kvtide.layout import Parallel
from kvtide.planner import CapacityPlan, Request, Workload, plan_capacity

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
GB = 10**9
XHTML = "{http://www.w3.org/1999/xhtml}"


def text_of(page: str) -> str:
    return " ".join("".join(ElementTree.fromstring(page).itertext()).split())


def worked_example() -> CapacityPlan:
    return plan_capacity(
        CONFIGS / "gqa-indexer.json",
        memory=60 * GB,
        pool_ratio=(0.85, 0.15),
        needs={"indexer": 4 * GB},
    )


def test_the_worked_example_is_on_the_page() -> None:
    text = text_of(draw_page(worked_example()))
    assert "Stranded: 5,000,000,000 bytes, room for 38,147 tokens of cache or 19 prefixes" in text
    assert "9.000 GB, 5.000 GB stranded" in text
    assert "Every token adds 139,264 bytes" in text


def test_the_bars_are_as_long_as_the_bytes() -> None:
    root = ElementTree.fromstring(draw_page(worked_example()))
    widths = {
        rect.findtext(f"{XHTML}title"): float(rect.attrib["width"])
        for rect in root.iter(f"{XHTML}rect")
    }
    full = widths["full: 51,000,000,000 bytes"]
    assert widths["indexer: 5,000,000,000 bytes stranded"] == pytest.approx(full * 5 / 51, abs=0.02)
    assert widths["indexer: 4,000,000,000 bytes"] == pytest.approx(full * 4 / 51, abs=0.02)


PLANS = {
    "no memory": lambda: plan_capacity(CONFIGS / "full-window.json"),
    "traffic": lambda: plan_capacity(
        CONFIGS / "full-state.json",
        memory=20 * GB,
        workload=Workload(requests=(Request(input_tokens=99, output_tokens=9),), concurrency=3),
        pool_ratio=(0.5, 0.5),
        parallel=Parallel(pipeline=2, attention_data=2),
    ),
    "too little": lambda: plan_capacity(CONFIGS / "gqa-indexer.json", memory=10**9),
}


@pytest.mark.parametrize("name", PLANS)
def test_every_page_is_well_formed_and_needs_nothing_else(name: str) -> None:
    plan = PLANS[name]()
    page = draw_page(plan)
    root = ElementTree.fromstring(page)
    tags = {element.tag.removeprefix(XHTML) for element in root.iter()}
    assert not tags & {"script", "link", "img", "iframe"}
    # The one address on the page is the name of the XML language, which nobody fetches.
    assert re.findall(r"https?://[^\"\s<]*", page) == ["http://www.w3.org/1999/xhtml"]
    assert "url(#stranded)" not in page or f'id="{STRANDED}"' in page
    assert "prefers-color-scheme: dark" in page
    for rect in root.iter(f"{XHTML}rect"):
        assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= LABEL + BARS + 0.1
    numbers = root.findall(f".//{XHTML}pre")[-1].text
    assert numbers is not None
    assert json.loads(numbers) == plan.to_json()


def test_names_are_escaped() -> None:
    config = json.loads((CONFIGS / "gqa-indexer.json").read_text())
    plan = plan_capacity(config | {"_name_or_path": "<b>&co"})
    assert plan.model == "<b>&co"
    assert "<b>&co" in text_of(draw_page(plan))


def test_bars_share_one_scale() -> None:
    rows = [
        Row(label="a", segments=(Segment(value=3, kind="p0", title="x"),), note="n"),
        Row(label="b", segments=(Segment(value=1, kind=STRANDED, title="y"),), note="<"),
        Row(label="c", segments=(), note=""),
    ]
    svg = ElementTree.fromstring(bars(rows, "bars & more"))
    assert svg.attrib["viewBox"] == f"0 0 {LABEL + BARS + NOTE} 90"
    widths = [float(rect.attrib["width"]) for rect in svg.iter("rect")]
    assert widths == pytest.approx([BARS, BARS / 3], abs=0.01)


def test_labels_that_are_too_long_keep_their_end() -> None:
    row = Row(label="a_long_module_of_policies:its_plan", segments=(), note="")
    (label, _) = ElementTree.fromstring(bars([row], "")).iter("text")
    assert label.text == "…odule_of_policies:its_plan"
    assert len(label.text) <= LETTERS


def test_the_command_writes_the_page_beside_its_report(tmp_path: Path) -> None:
    out = tmp_path / "plan.html"
    config = str(CONFIGS / "gqa-indexer.json")
    result = CliRunner().invoke(app, ["plan", config, "--memory", "60GB", "--html", str(out)])
    assert result.exit_code == 0
    assert f"Written: {out}" in result.stdout
    assert out.read_text().startswith("<!DOCTYPE html>")
    both = CliRunner().invoke(app, ["plan", config, "--html", str(out), "--json"])
    assert json.loads(both.stdout)["model"] == "gqa-indexer"
