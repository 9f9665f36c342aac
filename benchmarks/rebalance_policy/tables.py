"""From runs to markdown: the best fixed split of each phase, and how policies compare with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Row = dict[str, Any]

REACH = 0.97
"""Of the best fixed split's hit tokens: what a policy is to reach after a shift."""
STATIONARY = 0.98
"""The same, where nothing shifts."""
STRANDED = 0.02
"""Of the budget: what a policy may strand in steady state."""
EVEN = 1.005
"""Times this counts as equal, for seconds and tokens: pauses and ties are not defeats."""
STEADY_MIXTURE = "stationary"


@dataclass(frozen=True, slots=True)
class Group:
    """All runs of one model on one mixture."""

    mixture: str
    model: str
    rows: list[Row]

    def of(self, policy: str) -> list[Row]:
        """Runs of a policy that could be run, by start."""
        found = [r for r in self.rows if r["policy"] == policy and "error" not in r]
        return sorted(found, key=lambda row: row["share"] or 0)

    @property
    def phases(self) -> int:
        """How many phases the mixture has."""
        return max((len(row["phases"]) for row in self.rows if "error" not in row), default=0)

    def best(self, phase: int) -> Row | None:
        """The fixed split with the most hit tokens in the steady part of a phase."""
        return max(self.of("static"), key=lambda row: _steady_hits(row, phase), default=None)

    def best_overall(self) -> Row | None:
        """The fixed split with the most hit tokens over all phases."""
        return max(self.of("static"), key=lambda row: row["totals"]["hit_tokens"], default=None)


def best_shares(rows: list[Row], grid: Sequence[float]) -> list[float]:
    """Shares half-way between each phase's best one on the grid and its neighbours there."""
    group = Group("", "", [row for row in rows if row["share"] in grid])
    stops = [0.0, *grid, 1.0]
    found: set[float] = set()
    for phase in range(group.phases):
        best = group.best(phase)
        if best is not None:
            at = stops.index(best["share"])
            halves = (stops[at - 1] + stops[at]) / 2, (stops[at] + stops[at + 1]) / 2
            found.update(round(share, 4) for share in halves)
    return sorted(found)


def tables(rows: list[Row]) -> str:
    """Everything, as markdown."""
    keys = dict.fromkeys((row["mixture"], row["model"]) for row in rows)
    groups = [
        Group(*key, [row for row in rows if (row["mixture"], row["model"]) == key]) for key in keys
    ]
    parts = (
        ("### Targets", _targets(groups)),
        ("### Each phase, 300 requests after its begin", _adaptation(groups)),
        ("### Tokens computed again, millions", _policies(groups, _recomputed)),
        ("### TTFT p99, seconds", _policies(groups, _ttft)),
        ("### What cannot be run", _errors(rows)),
    )
    codes = ", ".join(sorted({row["code"] for row in rows}))
    text = "\n\n".join(f"{title}\n\n{body}" for title, body in parts if body)
    return f"{len(rows)} runs of code {codes}.\n\n{text}"


# -- the phases ----------------------------------------------------------------------------------


def _adaptation(groups: list[Group]) -> str:
    """A line per model and phase: elastic from each start against the best fixed split."""
    head = (
        "mixture, model, phase",
        "infinite",
        "best split",
        "its hits",
        "elastic, of the best",
        "97 % after",
        "moved per 1,000",
        "stranded",
    )
    lines = [
        _adapted(group, phase, best)
        for group in groups
        for phase in range(group.phases)
        if (best := group.best(phase)) is not None and group.of("elastic")
    ]
    return _table(head, lines)


def _adapted(group: Group, phase: int, best: Row) -> list[str]:
    runs = group.of("elastic")
    infinite = group.of("infinite")
    return [
        f"{group.mixture}, {group.model}, {phase + 1}",
        f"{_hit_rate(infinite[0], phase):.1%}" if infinite else "",
        f"{best['share']:.0%}",
        f"{_hit_rate(best, phase):.1%}",
        _each(runs, lambda row: _flag(_ratio(row, best, phase), _goal(group), "{:.1%}")),
        _each(runs, lambda row: _arrived(row, best, phase)),
        _each(runs, lambda row: f"{_moved(row, phase):,}"),
        _each(runs, lambda row: _flag(-_stranded(row, phase), -STRANDED, "{:.1%}", -1)),
    ]


def _goal(group: Group) -> float:
    return STATIONARY if group.mixture == STEADY_MIXTURE else REACH


def _steady_hits(row: Row, phase: int) -> int:
    return row["phases"][phase]["steady_hit_tokens"]


def _hit_rate(row: Row, phase: int) -> float:
    return _steady_hits(row, phase) / max(1, row["phases"][phase]["steady_prompt_tokens"])


def _ratio(row: Row, best: Row, phase: int) -> float:
    return _steady_hits(row, phase) / max(1, _steady_hits(best, phase))


def _arrived(row: Row, best: Row, phase: int) -> str:
    """Requests after which the rest of the phase has 97 % of the best split's hits."""
    mine, other = (run["phases"][phase]["hits_by_bin"] for run in (row, best))
    for i in range(len(mine)):
        if sum(mine[i:]) >= REACH * sum(other[i:]):
            return str(i * row["bin"])
    return "never"


def _moved(row: Row, phase: int) -> int:
    return row["phases"][phase]["steady"].get("moved_per_1000", 0)


def _stranded(row: Row, phase: int) -> float:
    return row["phases"][phase]["steady"].get("stranded", 0.0)


# -- the policies --------------------------------------------------------------------------------

RIVALS = ("static", "periodic", "periodic-200", "padded", "lcm")


def _policies(groups: list[Group], value: Callable[[Row], float]) -> str:
    """A line per model: elastic and the others, and whom it does not beat."""
    head = ("mixture, model", "elastic", *RIVALS, "best split", "elastic is behind")
    lines: list[list[str]] = []
    for group in groups:
        if not group.of("elastic"):
            continue
        best = group.best_overall()
        lines.append(
            [
                f"{group.mixture}, {group.model}",
                _each(group.of("elastic"), lambda row: f"{value(row):.2f}"),
                *(_each(_rival(group, n), lambda row: f"{value(row):.2f}") for n in RIVALS),
                "" if best is None else f"{value(best):.2f} ({best['share']:.0%})",
                ", ".join(_behind(group, value)),
            ]
        )
    return _table(head, lines)


def _rival(group: Group, name: str) -> list[Row]:
    """Runs of a policy; of `static` those from elastic's starts."""
    starts = {row["share"] for row in group.of("elastic")}
    return [row for row in group.of(name) if name != "static" or row["share"] in starts]


def _behind(group: Group, value: Callable[[Row], float]) -> Iterator[str]:
    """The rivals that do better than elastic does from the same start (from any, without one)."""
    for name in RIVALS:
        for theirs in _rival(group, name):
            for mine in group.of("elastic"):
                same = theirs["share"] in (None, mine["share"])
                if same and value(mine) > EVEN * value(theirs) + 1e-9:
                    yield f"{name} {_start(mine)}"


def _recomputed(row: Row) -> float:
    return sum(phase["recomputed_tokens"] for phase in row["phases"]) / 1e6


def _ttft(row: Row) -> float:
    return row["latency"]["ttft"][-1]


def _start(row: Row) -> str:
    return f"{row['share']:.0%}"


# -- the targets ---------------------------------------------------------------------------------


def _targets(groups: list[Group]) -> str:
    """How many cells reach each target."""
    counts: dict[str, list[bool]] = {}
    for group in groups:
        for name, held in (*_phase_checks(group), *_rival_checks(group)):
            counts.setdefault(name, []).append(held)
    lines = [[name, f"{sum(held)} of {len(held)}"] for name, held in sorted(counts.items())]
    return _table(("target", "reached"), lines)


def _phase_checks(group: Group) -> Iterator[tuple[str, bool]]:
    """What is held for every start and phase."""
    goal = _goal(group)
    where = " (stationary)" if group.mixture == STEADY_MIXTURE else ""
    for phase in range(group.phases):
        best = group.best(phase)
        if best is None:
            continue
        for row in group.of("elastic"):
            reached = _ratio(row, best, phase) >= goal
            yield f"{goal:.0%} of the hits of the phase's best fixed split{where}", reached
            yield "at most 2 % stranded in steady state", _stranded(row, phase) <= STRANDED


def _rival_checks(group: Group) -> Iterator[tuple[str, bool]]:
    """What is held for every rival."""
    if not group.of("elastic"):
        return
    for what, value in (("recomputed tokens", _recomputed), ("TTFT p99", _ttft)):
        ahead = {text.split()[0] for text in _behind(group, value)}
        for name in RIVALS:
            if _rival(group, name):
                yield f"{what}: not behind {name}", name not in ahead


def _errors(rows: list[Row]) -> str:
    lines = [
        [f"{row['mixture']}, {row['model']}", f"{row['policy']} {row['share'] or ''}", row["error"]]
        for row in rows
        if "error" in row
    ]
    return _table(("mixture, model", "policy", "why"), lines)


# -- markdown ------------------------------------------------------------------------------------


def _each(rows: Sequence[Row], show: Callable[[Row], str]) -> str:
    return " / ".join(show(row) for row in rows)


def _flag(value: float, least: float, form: str, sign: int = 1) -> str:
    """A number, bold where it is below `least`; shown times `sign`."""
    text = form.format(sign * value)
    return text if value >= least else f"**{text}**"


def _table(head: Sequence[str], lines: list[list[str]]) -> str:
    if not lines:
        return ""
    ruled = [list(head), ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in ruled)
