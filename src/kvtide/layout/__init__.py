"""Model layers -> layer groups -> pages: pure arithmetic, no bytes and no torch."""

from kvtide.layout.buffer import ITEM_BYTES, Buffer
from kvtide.layout.grouping import ALIGN_BYTES, LayerGroup, Layout
from kvtide.layout.lifetime import Full, Lifetime, Mirror, Span, State, Window, needed_blocks
from kvtide.layout.parallel import Parallel, Speculative
from kvtide.layout.spec import (
    CompressedSpec,
    DraftSpec,
    FullSpec,
    IndexerSpec,
    LatentSpec,
    Spec,
    StateSpec,
    WindowSpec,
)
from kvtide.layout.stages import with_groups_of

__all__ = [
    "ALIGN_BYTES",
    "ITEM_BYTES",
    "Buffer",
    "CompressedSpec",
    "DraftSpec",
    "Full",
    "FullSpec",
    "IndexerSpec",
    "LatentSpec",
    "LayerGroup",
    "Layout",
    "Lifetime",
    "Mirror",
    "Parallel",
    "Span",
    "Spec",
    "Speculative",
    "State",
    "StateSpec",
    "Window",
    "WindowSpec",
    "needed_blocks",
    "with_groups_of",
]
