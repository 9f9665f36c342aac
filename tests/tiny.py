"""Small layouts, and a manager with its fake engine, that property tests and scenarios share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtide import KVManager, Layout, MemfdMemory, Options
from kvtide.layout import Buffer, DraftSpec, FullSpec, IndexerSpec, StateSpec, WindowSpec
from kvtide.memory import linux
from kvtide.testing.engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from kvtide import Sequence
    from kvtide.facts import PoolFacts
    from kvtide.layout import Spec

GRANULE = linux.page_bytes()


def full(dim: int = 8) -> FullSpec:
    """Key and value of `dim` float32 each: 64 bytes a token at the default."""
    return FullSpec(kv_heads=1, head_dim=dim, dtype="float32")


def window(tokens: int = 8, sinks: int = 0, dim: int = 8) -> WindowSpec:
    return WindowSpec(window=tokens, sinks=sinks, kv_heads=1, head_dim=dim, dtype="float32")


def state(num: int = 64, interval: int = 8) -> StateSpec:
    return StateSpec(buffers=(Buffer("ssm", (num,), "float32"),), interval_tokens=interval)


def draft(look_ahead: int = 3, dim: int = 8) -> DraftSpec:
    return DraftSpec(FullSpec(kv_heads=1, head_dim=dim, dtype="float32"), look_ahead)


def indexer(dim: int = 16) -> IndexerSpec:
    return IndexerSpec(dim=dim, dtype="float32")


def granule_wide(spec: Spec, block_tokens: int) -> Spec:
    """`spec`, so wide that its page of `block_tokens` tokens (or its state) fills one granule."""
    floats = GRANULE // 4
    match spec:
        case StateSpec():
            return state(floats, spec.interval_tokens)
        case DraftSpec():
            return draft(spec.look_ahead, floats // (2 * block_tokens))
        case WindowSpec():
            return window(spec.window, spec.sinks, floats // (2 * block_tokens))
        case IndexerSpec():
            return indexer(floats // block_tokens)
        case _:
            return full(floats // (2 * block_tokens))


class Rig:
    """A manager over memfd, its engine, and the few moves that every scenario makes.

    `specs[i]` is layer i, `pages[i]` the pages its pool can hold data in: each fills one granule,
    so the pool has one granule more (the sink). In elastic mode only their sum counts.
    """

    def __init__(
        self,
        *specs: Spec,
        pages: Seq[int],
        max_tokens: int,
        block_tokens: int = 4,
        max_sequences: int = 16,
        **options: Any,
    ) -> None:
        layers = {i: granule_wide(spec, block_tokens) for i, spec in enumerate(specs)}
        layout = Layout.from_layers(layers, block_tokens=block_tokens)
        total = sum(pages) + len(pages)
        options.setdefault("mode", "static")
        if options["mode"] == "static":
            shares = [(n + 1) / total + 1e-9 for n in pages]
            names = [group.name for group in layout.groups]
            options.setdefault("pool_ratio", dict(zip(names, shares, strict=True)))
        self.kv = KVManager(
            layout,
            MemfdMemory(total * GRANULE, GRANULE),
            max_sequences=max_sequences,
            max_tokens=max_tokens,
            options=Options(**options),
        )
        self.engine = FakeEngine(self.kv)

    def start(
        self, tokens: Seq[int], *, limit: int = 1 << 30, sample: bool = False, **how: Any
    ) -> Sequence:
        """Open, admit (room for one chunk of `limit`) and compute all tokens; must be possible."""
        seq = self.kv.open(list(tokens), **how)
        answer = self.kv.admit([seq], min(limit, seq.length))
        assert answer, answer
        self.engine.prefill([seq], limit=limit, sample=sample)
        self.kv.check()
        return seq

    def cache(self, tokens: Seq[int], **how: Any) -> None:
        """Compute these tokens and close, which leaves their whole blocks cached."""
        self.kv.close([self.start(tokens, **how)])
        self.kv.check()

    def lookup(self, tokens: Seq[int], **how: Any) -> int:
        """How many of these tokens could be reused."""
        return self.kv.open(list(tokens), **how).hit

    def facts(self, pool: str) -> PoolFacts:
        return self.kv.snapshot().pools[pool]

    def books(self) -> dict[str, tuple[int, int, int]]:
        """(free, used, cached) pages by pool."""
        return {n: (p.free, p.used, p.cached) for n, p in self.kv.snapshot().pools.items()}

    def idle(self) -> bool:
        """Whether nobody uses anything, after the books were audited."""
        self.kv.check()
        pools = self.kv.snapshot().pools.values()
        return all(p.used == 0 and p.free + p.in_flight + p.cached + 1 == p.pages for p in pools)
