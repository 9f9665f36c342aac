"""A configuration read for what its layers compute: kinds, specs, and whose caches they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kvtide.errors import ConfigError
from kvtide.layout import Parallel
from kvtide.layout.fields import Fields
from kvtide.layout.reader import Reader, Storage
from kvtide.layout.reading import family_of
from kvtide.layout.source import read_fields

if TYPE_CHECKING:
    from kvtide.layout import Spec
    from kvtide.layout.kinds import Kind

_Spec = TypeVar("_Spec")

_STORAGE = Storage(
    kv="bfloat16", index=None, activation="bfloat16", recurrent=None, interval_tokens=1
)
"""Only sizes are asked for, which no dtype changes."""


class CostFields(Fields):
    """The fields of a configuration, missed for another reason than a layout misses them."""

    def missing(self, *names: str) -> ConfigError:
        """The error for a field that must be there."""
        return ConfigError(
            f"{' or '.join(names)} is missing in {self.where}, and what a step costs depends on "
            f"it; {self.cure}"
        )


@dataclass(frozen=True, slots=True)
class Architecture:
    """The whole model, not one rank's share.

    Of layer i, `kinds[i]` is the kind of attention, `specs[i]` what it would cache, and
    `sources[i]` the layer whose keys and values it reads, i itself unless the family shares them.
    """

    fields: Fields
    kinds: tuple[Kind, ...]
    specs: tuple[tuple[Spec, ...], ...]
    sources: tuple[int, ...]

    @classmethod
    def of(cls, config: object) -> Architecture:
        """Read a configuration, as `Layout.from_config` takes it."""
        said = read_fields(config)
        fields = CostFields(said.values, said.where, said.cure)
        family = family_of(fields)
        reader = Reader(
            fields=fields,
            storage=_STORAGE,
            parallel=Parallel(),
            divides=family.divides,
            pairs=family.pairs,
        )
        kinds = family.kinds(fields, _num_layers(fields))
        specs = tuple(family.stores[kind](reader, layer) for layer, kind in enumerate(kinds))
        sources = family.reuses(fields, kinds) if family.reuses else range(len(kinds))
        return cls(fields, tuple(kinds), specs, tuple(sources))

    @property
    def family(self) -> str:
        """`model_type` of the text model."""
        return self.fields.text_or_none("model_type") or ""

    def spec(self, layer: int, kind: type[_Spec] | tuple[type[_Spec], ...]) -> _Spec | None:
        """What a layer caches of this kind, None if it does not."""
        return next((spec for spec in self.specs[layer] if isinstance(spec, kind)), None)

    def heads(self, layer: int) -> int:
        """Query heads of a layer."""
        return self.fields.at(layer).size("num_attention_heads")


def _num_layers(fields: Fields) -> int:
    said = fields.size_or_none("num_hidden_layers")
    if said is not None:
        return said
    listed = fields.text_or_none("hybrid_override_pattern") or fields.listed("layers_block_type")
    if not listed:
        raise fields.missing("num_hidden_layers")
    return len(listed)
