"""What a user writes behind a trace, `name=value` pairs, as the dataclass that it sets."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

_TRUTH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
_PAIR = re.compile(r"([a-z_]+)=(.*)")


def pairs_of(text: str, where: str) -> dict[str, str]:
    """`"a=1,b=2"` as a dict; raises ConfigError for anything else, and for a name given twice."""
    pairs: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        found = _PAIR.fullmatch(part.strip())
        if not found or found[1] in pairs:
            raise ConfigError(f"{where}: {part!r} must be name=value, each name once")
        pairs[found[1]] = found[2]
    return pairs


def names_of(kind: type[Any]) -> set[str]:
    """The names that the dataclass `kind` takes."""
    return {f.name for f in fields(kind)}


def settings(kind: type[T], pairs: Mapping[str, str], where: str) -> T:
    """The dataclass `kind` made from the pairs that it knows, the rest from its defaults.

    A value is read as the type of the default. Raises ConfigError if it is not one.
    """
    known: Any = kind
    types: dict[str, type[Any]] = {f.name: type(f.default) for f in fields(known)}
    given = {name: value for name, value in pairs.items() if name in types}
    return kind(**{n: _value(types[n], n, v, where) for n, v in given.items()})


def refuse_others(pairs: Mapping[str, str], known: set[str], where: str) -> None:
    """Raise ConfigError if a pair has a name that is not `known`."""
    unknown = sorted(pairs.keys() - known)
    if unknown:
        raise ConfigError(
            f"{where}: no option {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        )


def _value(kind: type[Any], name: str, text: str, where: str) -> Any:  # noqa: ANN401 - by kind
    readers: dict[type[Any], Callable[[str], Any]] = {bool: lambda t: _TRUTH[t.lower()]}
    try:
        value = readers.get(kind, kind)(text)
    except (KeyError, ValueError) as cause:
        wanted = {bool: "1 or 0", int: "a whole number", float: "a number"}[kind]
        raise ConfigError(f"{where}: {name} must be {wanted}, got {text!r}") from cause
    if value != value:  # nan
        raise ConfigError(f"{where}: {name} must be a number, got {text!r}")
    return value
