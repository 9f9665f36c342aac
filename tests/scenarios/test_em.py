"""Statistics: reuse is counted when it has happened, once, and only for traffic."""

from __future__ import annotations

from tests.tiny import Rig, full

from kvtide import Origin


def test_em_4_reuse_counted_again_on_every_admission_retry() -> None:
    """Five refusals and one admission count one reuse; a request that never ran counts none."""
    rig = Rig(full(), pages=[6], max_tokens=24)
    prompt = list(range(8))
    rig.cache(prompt)
    hog = rig.start([50] * 12)
    w = rig.kv.open([*prompt, *range(60, 72)])
    before = rig.kv.snapshot()
    for _ in range(5):
        assert not rig.kv.admit([w])
    rig.kv.close([hog])
    assert rig.kv.admit([w])
    assert rig.kv.snapshot().hit_tokens == before.hit_tokens  # admitted, nothing has run
    rig.engine.prefill([w])
    rig.kv.close([w])
    v = rig.kv.open([*prompt, 99])
    assert v.hit == 8
    assert rig.kv.admit([v])
    rig.kv.close([v])  # cancelled before its first step
    after = rig.kv.snapshot()
    assert after.hit_tokens - before.hit_tokens == 8
    assert after.prompt_tokens - before.prompt_tokens == 20


def test_em_4_a_resumed_sequence_is_not_a_new_request() -> None:
    """Suspend and resume find the own blocks again; that is no reuse of anybody's prompt."""
    rig = Rig(full(), pages=[6], max_tokens=24)
    seq = rig.start(range(10), sample=True)
    first = rig.kv.snapshot()
    rig.kv.suspend([seq])
    assert rig.kv.resume([seq])
    rig.engine.prefill([seq], sample=True)
    second = rig.kv.snapshot()
    assert (second.hit_tokens, second.prompt_tokens) == (first.hit_tokens, first.prompt_tokens)
    assert second.recomputed_tokens - first.recomputed_tokens == 10 - 8


def test_em_5_warm_up_pollutes_hit_and_capacity_statistics() -> None:
    """Three huge warm-up prompts leave no trace in the hit rate."""
    rig = Rig(full(), pages=[300], max_tokens=1004)
    for dummy in range(3):
        rig.cache([dummy] * 1000, origin=Origin.WARMUP)
        rig.cache([dummy] * 1001, origin=Origin.PADDING)
    assert rig.kv.snapshot().prompt_tokens == 0
    rig.cache(range(8))
    rig.cache(range(9))
    assert rig.kv.snapshot().prompt_tokens == 17
    assert rig.kv.snapshot().hit_tokens == 8
