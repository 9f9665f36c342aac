"""Stages of a pipeline that decide alike: each keeps books for all layer groups of the model."""

from __future__ import annotations

from dataclasses import replace

from kvtide.errors import ConfigError
from kvtide.layout.buffer import Buffer
from kvtide.layout.grouping import LayerGroup, Layout

PLACEHOLDER = "placeholder"
"""Name of the one buffer, a byte an entry, of a group that a stage has no layers of."""


def with_groups_of(stage: Layout, whole: Layout) -> Layout:
    """The layout of one stage, with every group that the whole model has, in its order and by its
    names.

    Chunks, matches and evictions depend on the lifetimes of the model's groups. A stage without
    state layers, say, would split a prompt at other boundaries than one that has some. A group
    without layers on this stage gets a placeholder: the same lifetime and blocks, a byte an entry
    instead of what the layers store. ConfigError if the stage stores what the model does not.
    """
    found = {_key(group): group for group in stage.groups}
    known = {_key(group) for group in whole.groups}
    strange = [group.name for key, group in found.items() if key not in known]
    if strange or len(found) < len(stage.groups) or len(known) < len(whole.groups):
        raise ConfigError(
            f"groups of the stage are {[g.name for g in stage.groups]}, of the model "
            f"{[g.name for g in whole.groups]}: {strange or 'two'} cannot be told to be one of the "
            "model's; read both layouts with the same options, apart from the pipeline"
        )
    return Layout(
        block_tokens=whole.block_tokens,
        groups=tuple(
            replace(found[_key(group)], name=group.name)
            if _key(group) in found
            else _placeholder(group)
            for group in whole.groups
        ),
    )


def _key(group: LayerGroup) -> tuple[object, ...]:
    """What is the same for the layers of a group on every stage."""
    return group.lifetime, group.buffers, group.ratio, group.context, group.block_tokens


def _placeholder(group: LayerGroup) -> LayerGroup:
    """As the group, but for its bytes; its layer is one of another stage."""
    return replace(group, layers=group.layers[:1], buffers=(Buffer(PLACEHOLDER, (1,), "uint8"),))
