"""From the command line as typed to recipes. Errors name the option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtide.cli.units import parse_bytes, parse_positive, parse_ratio, parse_whole
from kvtide.errors import ConfigError
from kvtide.sim.recipe import Recipe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

POLICIES = ("static", "elastic")
"""What is compared if nothing else is asked for: what the split costs, what moving it gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line as typed; None where an option was not given."""

    config: Path | None = None
    trace: tuple[str, ...] = ()
    memory: str | None = None
    policy: tuple[str, ...] = ()
    hardware: str | None = None
    params: str | None = None
    active_params: str | None = None
    weight_dtype: str | None = None
    tp: str | None = None
    kv_dtype: str | None = None
    block_tokens: str | None = None
    state_interval: str | None = None
    granule: str | None = None
    pool_ratio: str | None = None
    rate: str | None = None
    requests: str | None = None
    chunk_tokens: str | None = None
    max_running: str | None = None
    max_tokens: str | None = None
    slo_ttft: str | None = None
    slo_itl: str | None = None
    seed: str | None = None
    sweep: tuple[str, ...] = ()


def recipe_of(asked: Asked) -> Recipe:
    """What all runs have in common. Raises ConfigError naming the option."""
    if asked.config is None:
        raise ConfigError("no model is given; name its config.json, or the folder of it")
    if not asked.trace:
        raise ConfigError(
            "--trace is not given; give FORMAT:PATH, or synthetic (--download tells what there is)"
        )
    axes = axes_of(asked)
    if asked.memory is None and "memory_bytes" not in axes:
        raise ConfigError("--memory is not given; give bytes of one rank, such as 60GB")
    given: dict[str, Any] = {"memory_bytes": 0, "config": str(asked.config), "traces": asked.trace}
    for name, (field, parse) in _OPTIONS.items():
        text: str | None = getattr(asked, name.replace("-", "_"))
        if text is not None:
            given[field] = parse(f"--{name}", text)
    return Recipe(**given)


def policies_of(asked: Asked) -> tuple[str, ...]:
    """The policies to compare, each once."""
    return tuple(dict.fromkeys(asked.policy or POLICIES))


def axes_of(asked: Asked) -> dict[str, list[Any]]:
    """Values by field of a recipe, in the order given; policies vary fastest unless named."""
    axes: dict[str, list[Any]] = {}
    for text in asked.sweep:
        name, equals, values = text.partition("=")
        field, parse = {**_OPTIONS, "policy": ("policy", _text)}.get(name, ("", _text))
        if not (equals and field):
            raise ConfigError(
                f"--sweep has {text!r}; write NAME=VALUE,VALUE with NAME one of "
                f"{', '.join([*_OPTIONS, 'policy'])}"
            )
        if field in axes:
            raise ConfigError(f"--sweep names {name} twice; give all its values at once")
        axes[field] = [parse(f"--sweep {name}", value.strip()) for value in values.split(",")]
    if axes and "policy" not in axes:
        axes["policy"] = list(policies_of(asked))
    return axes


def _text(option: str, text: str) -> str:
    if not text:
        raise ConfigError(f"{option} has an empty value; give a name")
    return text


def _ratio(option: str, text: str) -> object:
    """Commas or, where these part values of a sweep, slashes between the shares."""
    del option  # the parser names it
    return parse_ratio(text.replace("/", ","))


def _billions(option: str, text: str) -> float:
    """Parameters: "21B" is 21e9."""
    plain = text.strip()
    times = 1e9 if plain[-1:] in ("b", "B") else 1.0
    return times * parse_positive(option, plain.rstrip("bB"))


def _seed(option: str, text: str) -> int:
    return parse_whole(option, text, at_least=0)


_OPTIONS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "memory": ("memory_bytes", parse_bytes),
    "hardware": ("hardware", _text),
    "params": ("params", _billions),
    "active-params": ("active_params", _billions),
    "weight-dtype": ("weight_dtype", _text),
    "tp": ("tensor", parse_whole),
    "kv-dtype": ("kv_dtype", _text),
    "block-tokens": ("block_tokens", parse_whole),
    "state-interval": ("state_interval", parse_whole),
    "granule": ("granule_bytes", parse_bytes),
    "pool-ratio": ("pool_ratio", _ratio),
    "rate": ("rate", parse_positive),
    "requests": ("requests", parse_whole),
    "chunk-tokens": ("chunk_tokens", parse_whole),
    "max-running": ("max_running", parse_whole),
    "max-tokens": ("max_tokens", parse_whole),
    "slo-ttft": ("ttft", parse_positive),
    "slo-itl": ("itl", parse_positive),
    "seed": ("seed", _seed),
}
"""Option (and name of a sweep's axis) -> field of a recipe, and how its value is read."""
