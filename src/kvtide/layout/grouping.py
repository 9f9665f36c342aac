"""Specs of layers -> layer groups -> bytes of a page and places inside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvtide.errors import ConfigError
from kvtide.layout.buffer import Buffer
from kvtide.layout.lifetime import Lifetime, State, require_positive
from kvtide.layout.parallel import Parallel, Speculative
from kvtide.layout.spec import Spec, ratio_of, whole_or_float, without_idle_window
from kvtide.types import align_up

if TYPE_CHECKING:
    from collections.abc import Mapping


ALIGN_BYTES = 16
"""Every buffer starts at a multiple of this inside a page, as vector loads want it."""

_GroupKey: TypeAlias = tuple[str, Lifetime, tuple[Buffer, ...], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers with the same page layout and lifetime; they share one page table.

    A page is page-major: `[layer][buffer][entry]...`, each buffer padded to `ALIGN_BYTES`. An
    entry is a token, or what stands for `ratio` tokens; `context` ranks hold equal shares of the
    entries of every block, and a page is one rank's share. In a state group a page is one state:
    `[layer][buffer]`. `layers` are the model's layer indices.
    """

    name: str
    lifetime: Lifetime
    layers: tuple[int, ...]
    buffers: tuple[Buffer, ...]
    block_tokens: int
    ratio: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        """Refuse groups without layers, buffers or tokens, and doubled layers or buffers."""
        require_positive("block_tokens", self.block_tokens)
        require_positive("ratio", self.ratio)
        require_positive("context", self.context)
        if not self.is_state and self.block_tokens % (self.ratio * self.context):
            raise ConfigError(
                f"block_tokens is {self.block_tokens}, but group {self.name!r} folds {self.ratio} "
                f"tokens into an entry and shares blocks among {self.context} ranks; "
                f"use a multiple of {self.ratio * self.context}"
            )
        names = tuple(buffer.name for buffer in self.buffers)
        for field, values in (("layers", self.layers), ("buffers", names)):
            if not values or len(set(values)) != len(values):
                raise ConfigError(
                    f"{field} of group {self.name!r} are {values}; give at least one, none twice"
                )

    @property
    def is_state(self) -> bool:
        """Whether a page holds one state instead of the tokens of one block."""
        return isinstance(self.lifetime, State)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, padding included; a multiple of `ALIGN_BYTES`."""
        return len(self.layers) * self._layer_bytes

    @property
    def entries(self) -> int:
        """Entries of every buffer in a page; 1 in a state group."""
        return 1 if self.is_state else self.block_tokens // (self.ratio * self.context)

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes that one token adds on this rank, over all layers of the group and on average,
        padding excluded; an int where that is whole, None for state."""
        if self.is_state:
            return None
        return whole_or_float(self._payload_bytes, self.ratio * self.context)

    @property
    def bytes_per_state(self) -> int | None:
        """Bytes of one state over all layers of the group, padding excluded; None for tokens."""
        return self._payload_bytes if self.is_state else None

    def offset(self, layer_position: int, buffer_name: str) -> int:
        """Byte offset inside a page of one buffer of the layer at `layers[layer_position]`."""
        if not 0 <= layer_position < len(self.layers):
            raise ConfigError(
                f"layer_position {layer_position} is outside group {self.name!r}; "
                f"it has {len(self.layers)} layers"
            )
        at = layer_position * self._layer_bytes
        for buffer in self.buffers:
            if buffer.name == buffer_name:
                return at
            at += self._padded(buffer)
        known = ", ".join(buffer.name for buffer in self.buffers)
        raise ConfigError(f"group {self.name!r} has no buffer {buffer_name!r}; it has {known}")

    @property
    def _payload_bytes(self) -> int:
        return len(self.layers) * sum(buffer.bytes for buffer in self.buffers)

    @property
    def _layer_bytes(self) -> int:
        return sum(self._padded(buffer) for buffer in self.buffers)

    def _padded(self, buffer: Buffer) -> int:
        return align_up(self.entries * buffer.bytes, ALIGN_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a model caches: its layer groups, all on blocks of `block_tokens` tokens."""

    block_tokens: int
    groups: tuple[LayerGroup, ...]

    def __post_init__(self) -> None:
        """Refuse no groups, doubled names, mixed block sizes and off-grid state intervals."""
        require_positive("block_tokens", self.block_tokens)
        names = tuple(group.name for group in self.groups)
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"groups are {names}; give at least one, each with its own name")
        for group in self.groups:
            self._require_on_grid(group)
        folding = [group.name for group in self.groups if group.ratio > 1]
        if folding and not any(group.is_state for group in self.groups):
            raise ConfigError(
                f"groups {', '.join(folding)} fold several tokens into an entry, but no group "
                "keeps the tokens that are not folded yet; add a StateSpec for them"
            )

    @classmethod
    def from_layers(
        cls,
        layers: Mapping[int, Spec | tuple[Spec, ...]],
        *,
        block_tokens: int,
        max_tokens: int | None = None,
        context: int = 1,
    ) -> Layout:
        """Group the layers of a model, given what each of them stores on one rank.

        A window that no sequence of `max_tokens` tokens can outgrow is full attention, so its
        layers join that group. `context` ranks share the tokens of every block. Groups come in
        the order of their first layer. Raises ConfigError.
        """
        if max_tokens is not None:
            require_positive("max_tokens", max_tokens)
        if not layers:
            raise ConfigError("layers is empty; a model must have at least one layer that caches")
        members: dict[_GroupKey, list[int]] = {}
        for layer in sorted(layers):
            specs = layers[layer]
            for spec in specs if isinstance(specs, tuple) else (specs,):
                plain = without_idle_window(spec, max_tokens)
                key = (plain.kind, plain.lifetime, plain.buffers, ratio_of(plain))
                members.setdefault(key, []).append(layer)
        groups = _name_groups(members, block_tokens, context)
        return cls(block_tokens=block_tokens, groups=groups)

    @classmethod
    def from_config(  # noqa: PLR0913 (keywords only: what a server is started with)
        cls,
        config: object,
        *,
        block_tokens: int,
        kv_dtype: str | None = None,
        index_dtype: str | None = None,
        state_dtype: str | None = None,
        parallel: Parallel | None = None,
        speculative: Speculative | None = None,
        max_tokens: int | None = None,
        state_interval: int | None = None,
    ) -> Layout:
        """What one rank caches of the model that a configuration describes.

        `config` is a dict, the path of a config.json or its folder, or a configuration object of
        transformers. `kv_dtype` (default: the configuration's) is that of keys, values and latents:
        a float, `fp8`, `int8`, `int4` or `nvfp4` with their scales, or `fp8_ds_mla`; `index_dtype`
        that of indexer keys (default: `fp8` with scales where DeepSeek's kernels want it, else as
        computed); `state_dtype` that of recurrent states (default: the configuration's, else the
        family's). `speculative` adds a drafter, `max_tokens` is as in `from_layers`, and
        `state_interval` (default: about 1,024, a multiple of `block_tokens`) is how far apart the
        last states of a prompt are kept, earlier ones further. Raises ConfigError naming the field
        that is missing, contradictory or unknown: nothing is guessed.
        """
        from kvtide.layout import reading  # noqa: PLC0415 (most layouts are not read)

        fields = reading.read_fields(config)
        reading.family_of(fields)  # an unknown type is the first thing to hear of
        require_positive("block_tokens", block_tokens)
        reading.require_kind("parallel", parallel, Parallel)
        reading.require_kind("speculative", speculative, Speculative)
        storage = reading.storage_of(
            fields,
            block_tokens=block_tokens,
            kv_dtype=kv_dtype,
            index_dtype=index_dtype,
            state_dtype=state_dtype,
            state_interval=state_interval,
        )
        spread = parallel or Parallel()
        layers = reading.layers_of(fields, storage, spread, speculative)
        return cls.from_layers(
            layers, block_tokens=block_tokens, max_tokens=max_tokens, context=spread.context
        )

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token over all groups that store tokens, padding excluded."""
        return sum(group.bytes_per_token or 0 for group in self.groups)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one state of a sequence over all groups that store states."""
        return sum(group.bytes_per_state or 0 for group in self.groups)

    def group(self, name: str) -> LayerGroup:
        """The group of that name; ConfigError if there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        known = ", ".join(group.name for group in self.groups)
        raise ConfigError(f"layout has no group {name!r}; it has {known}")

    def _require_on_grid(self, group: LayerGroup) -> None:
        if group.block_tokens != self.block_tokens:
            raise ConfigError(
                f"block_tokens of group {group.name!r} is {group.block_tokens}; "
                f"use the layout's {self.block_tokens}"
            )
        if isinstance(group.lifetime, State) and group.lifetime.interval_tokens % self.block_tokens:
            raise ConfigError(
                f"interval_tokens of group {group.name!r} is {group.lifetime.interval_tokens}; "
                f"use a multiple of block_tokens = {self.block_tokens}: "
                "a state is kept only where a block ends"
            )


def _name_groups(
    members: Mapping[_GroupKey, list[int]], block_tokens: int, context: int
) -> tuple[LayerGroup, ...]:
    seen: dict[str, int] = {}
    groups: list[LayerGroup] = []
    for (kind, lifetime, buffers, ratio), layers in members.items():
        seen[kind] = seen.get(kind, 0) + 1
        name = kind if seen[kind] == 1 else f"{kind}_{seen[kind]}"
        groups.append(
            LayerGroup(
                name=name,
                lifetime=lifetime,
                layers=tuple(layers),
                buffers=buffers,
                block_tokens=block_tokens,
                ratio=ratio,
                context=1 if isinstance(lifetime, State) else context,
            )
        )
    return tuple(groups)
