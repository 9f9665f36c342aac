"""The fields of a model configuration, read with their types; a wrong one is named in the error."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kvtide.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


MAX_SIZE = 2**31 - 1
"""No size of a model is larger; what is would only make absurd layouts."""


class Fields:
    """A configuration as published. `where` is what errors call it, `cure` what helps if a field
    is missing."""

    def __init__(self, values: Mapping[str, object], where: str, cure: str = "add it") -> None:
        self.values = values
        self.where = where
        self.cure = cure

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def says(self, name: str) -> bool:
        """Whether the field is there, be it null."""
        return name in self.values

    def with_values(self, **values: object) -> Fields:
        """The same with some fields replaced."""
        return Fields({**self.values, **values}, self.where, self.cure)

    def at(self, layer: int) -> Fields:
        """The same with what `per_layer_config` says of one layer."""
        overrides = self.inner("per_layer_config")
        if overrides is None:
            return self
        for key in overrides.values:
            if not key.isdecimal():
                raise overrides.unknown("a layer", key, "layer numbers")
            if int(key) == layer:
                own = overrides.inner(key)
                return self if own is None else self.with_values(**own.values)
        return self

    def size(self, *names: str) -> int:
        """A whole number >= 1 under the first of these names that is there."""
        value = self.size_or_none(*names)
        if value is None:
            raise self.missing(*names)
        return value

    def size_or_none(self, *names: str) -> int | None:
        """As `size`, None if none is there."""
        value = self.count_or_none(*names)
        if value == 0:
            raise ConfigError(f"{self._first(*names)} of {self.where} is 0; it must be >= 1")
        return value

    def count(self, *names: str) -> int:
        """A whole number >= 0 under the first of these names that is there."""
        value = self.count_or_none(*names)
        if value is None:
            raise self.missing(*names)
        return value

    def count_or_none(self, *names: str) -> int | None:
        """As `count`, None if none is there."""
        name = self._first(*names)
        if name is None:
            return None
        value = self.values[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_SIZE:
            huge = isinstance(value, int) and abs(value) > MAX_SIZE
            raise ConfigError(
                f"{name} of {self.where} is {'a huge number' if huge else repr(value)}; "
                f"give a whole number from 0 to {MAX_SIZE:,}"
            )
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{name} of {self.where} is {value!r}; it must be true or false")
        return value

    def text_or_none(self, *names: str) -> str | None:
        """A string under the first of these names that is there."""
        name = self._first(*names)
        if name is None:
            return None
        value = self.values[name]
        if not isinstance(value, str):
            raise ConfigError(f"{name} of {self.where} is {value!r}; it must be a string")
        return value

    def per_layer(self, name: str, num_layers: int) -> list[object] | None:
        """A list with one entry for every layer, or None if the field is not there."""
        items = self.listed(name)
        if items is not None and len(items) != num_layers:
            raise ConfigError(
                f"{name} of {self.where} has {len(items)} entries for {num_layers} layers; "
                "it must have one for each"
            )
        return items

    def listed(self, name: str) -> list[object] | None:
        """A list, or None if the field is not there."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name} of {self.where} is {value!r}; it must be a list")
        return list(cast("list[object]", value))

    def inner(self, name: str) -> Fields | None:
        """The fields of a nested object, or None if it is not there."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ConfigError(f"{name} of {self.where} is {value!r}; it must be an object")
        return Fields(cast("dict[str, object]", value), f"{name} of {self.where}", self.cure)

    def missing(self, *names: str) -> ConfigError:
        """The error for a field that must be there."""
        return ConfigError(
            f"{' or '.join(names)} is missing in {self.where}, and what is cached depends on it; "
            f"{self.cure}"
        )

    def unknown(self, name: str, value: object, known: str) -> ConfigError:
        """The error for a value no rule is known for."""
        return ConfigError(
            f"{name} of {self.where} has {value!r}; known are {known}. "
            "Build the layout of other models with Layout.from_layers"
        )

    def _first(self, *names: str) -> str | None:
        return next((name for name in names if self.values.get(name) is not None), None)
