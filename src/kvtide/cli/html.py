"""The frame of a page that needs nothing else: no network, no script; light or dark. Pure.

Pages are well-formed XML too, so that anything can read them.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from kvtide.cli import charts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2937; --faint: #6b7280;
  --line: #d1d5db; --plain: #9ca3af; --warn: #b91c1c; --ours: #0f766e; --given: #5eead4; }
@media (prefers-color-scheme: dark) { :root { --paper: #111827; --ink: #e5e7eb; --faint: #9ca3af;
  --line: #374151; --plain: #6b7280; --warn: #f87171; --ours: #14b8a6;
  --given: #115e59; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 960px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
p { margin: 0.3rem 0; } .faint { color: var(--faint); } .warn { color: var(--warn); }
svg { width: 100%; height: auto; } svg[aria-hidden] { position: absolute; width: 0; }
svg text { fill: var(--ink); font-size: 13px; }
.hatch { stroke: var(--warn); stroke-width: 4; } .outline { stroke: var(--warn); }
.legend span { margin-right: 1.2rem; display: inline-block; }
.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 0.4rem; }
.striped { border: 1px solid var(--warn); background: repeating-linear-gradient(45deg,
  var(--warn) 0 2px, transparent 2px 5px); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.6rem; border-bottom: 1px solid var(--line); text-align: right; }
.numbers td { white-space: nowrap; }
th:first-child, td:first-child, .words td { text-align: left; }
.wide { overflow-x: auto; } pre { overflow-x: auto; font-size: 12px; line-height: 1.4; }
"""


def frame(title: str, parts: Iterable[str], *, styles: str = "") -> str:
    """The page as text: `parts` are lines of its body, `styles` rules of CSS beside the common."""
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en" xmlns="http://www.w3.org/1999/xhtml">\n<head>\n'
        '<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(title)}</title>\n"
        f"<style>{_STYLE}{charts.styles()}{styles}</style>\n</head>\n<body>\n{body}\n</body>\n"
        "</html>\n"
    )


def table(rows: Sequence[Sequence[str]], head: Sequence[str], *, kind: str = "numbers") -> str:
    """A table; `kind` is its class: "numbers" to the right, or "words" to the left."""
    titles = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    top = f"<thead><tr>{titles}</tr></thead>" if head else ""
    lines = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<div class="wide"><table class="{kind}">{top}<tbody>{lines}</tbody></table></div>'
