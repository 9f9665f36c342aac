"""Security: content, tenant and adapter decide a hit; nothing that can be guessed does."""

from __future__ import annotations

import hashlib

import pytest
from tests.tiny import Rig, full, state, window

from kvtide import ConfigError, Media, Scope

IMAGE = 1000
"""The placeholder id that stands for every token of every image."""


def sha(content: bytes, *facts: object) -> bytes:
    """What a caller should pass: a digest of the bytes and of everything else the encoder sees."""
    return hashlib.sha256(content + repr(facts).encode()).digest()


def test_se_1_predictable_or_weak_page_keys() -> None:
    """Keys only find candidates: where every key collides, equal tokens alone still make a hit."""
    rig = Rig(full(), pages=[8], max_tokens=16, key=lambda parent, block: 7)
    x, y = list(range(8)), list(range(50, 58))
    rig.cache(x)
    assert rig.lookup([*y, 1]) == 0
    rig.cache(y)
    assert rig.lookup([*x, 1]) == 8
    assert rig.lookup([*y, 1]) == 8
    assert rig.lookup([*range(60, 68), 1]) == 0
    seqs = [rig.start([*x, 70]), rig.start([*y, 71])]
    rig.engine.verify(seqs)


def test_se_1_the_default_key_needs_no_secret() -> None:
    """Prompts made to collide under the default key would share nothing; here, ones that differ."""
    rig = Rig(full(), pages=[8], max_tokens=16)
    rig.cache([1, 2, 3, 4, 5, 6, 7, 8])
    for place in range(8):
        other = [1, 2, 3, 4, 5, 6, 7, 8, 9]
        other[place] += 100
        assert rig.lookup(other) == place  # whole blocks and the equal start of the next


def test_se_3_media_identity_cut_to_16_bits_or_hashed_without_shape() -> None:
    """The whole digest counts, wherever in a page the span begins or ends."""
    tail = b"\xab\xcd"
    one, two = bytes(30) + tail, bytes([1]) + bytes(29) + tail  # equal in the last 16 bits
    prompt = [5, 6, *[IMAGE] * 7, 8]  # the span covers parts of pages 0 and 2, and all of page 1
    for other in (two, sha(b"pixels", 150, 30)):
        rig = Rig(full(), pages=[8], max_tokens=16)
        first = one if other is two else sha(b"pixels", 30, 150)
        rig.cache(prompt, media=[Media(2, 7, first)])
        assert rig.lookup([*prompt, 9], media=[Media(2, 7, other)]) == 2
        assert rig.lookup([*prompt, 9], media=[Media(2, 7, first)]) == 8  # whole blocks


def test_se_3_equal_digests_of_other_lengths_do_not_match() -> None:
    """The same picture as 6 and as 7 tokens was encoded differently."""
    rig = Rig(full(), pages=[8], max_tokens=16)
    rig.cache([*[IMAGE] * 6, 1, 2], media=[Media(0, 6, sha(b"cat"))])
    assert rig.lookup([*[IMAGE] * 7, 1, 2], media=[Media(0, 7, sha(b"cat"))]) == 0


def test_se_3_a_short_digest_is_refused() -> None:
    """Sixteen bits of identity are not taken at the door."""
    with pytest.raises(ConfigError, match="16 bits; give at least 128"):
        Media(0, 4, b"\xab\xcd")


@pytest.mark.parametrize(("partial", "hit"), [(False, 0), (True, 1)])
def test_se_4_placeholders_of_different_media_match(partial: bool, hit: int) -> None:
    """Equal placeholders over other content end the match; where blocks may be shared in part, the
    text token before the image still counts.
    """
    rig = Rig(full(), pages=[8], max_tokens=16, block_tokens=2, partial_reuse=partial)
    prompt = [3, IMAGE, IMAGE, IMAGE]
    one, two = sha(b"one"), sha(b"two")
    a = rig.start(prompt, media=[Media(1, 3, one)])
    rig.kv.close([a])
    assert rig.lookup([*prompt, 9], media=[Media(1, 3, two)]) == hit
    assert rig.lookup([*prompt, 9], media=[Media(1, 3, one)]) == 4
    assert rig.lookup([*prompt, 9]) == hit  # plain ids never meet content
    b = rig.start([*prompt, 9], media=[Media(1, 3, two)])
    rig.engine.verify([b])


def test_se_4_content_stays_apart_across_a_reset() -> None:
    """Ids given to content before a reset do not come back as someone else's afterwards."""
    rig = Rig(full(), pages=[8], max_tokens=16)
    prompt = [IMAGE] * 8
    a = rig.start(prompt, media=[Media(0, 8, sha(b"one"))])
    rig.kv.reset()
    b = rig.start(prompt, media=[Media(0, 8, sha(b"two"))])
    assert not set(a.tokens.tolist()) & set(b.tokens.tolist())
    rig.kv.close([a, b])
    assert rig.lookup([*prompt, 1], media=[Media(0, 8, sha(b"one"))]) == 0
    assert rig.lookup([*prompt, 1], media=[Media(0, 8, sha(b"two"))]) == 8


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (Scope(salt=b"a"), Scope(salt=b"b")),
        (Scope(salt=b"a"), Scope()),
        (Scope(adapter="a"), Scope(adapter="b")),
        (Scope(salt=b"a"), Scope(adapter="a")),
    ],
)
@pytest.mark.parametrize("others", [(), (window(8),), (state(),)], ids=["full", "window", "state"])
def test_se_5_salt_at_the_root_isolates_everything_below(
    mine: Scope, theirs: Scope, others: tuple
) -> None:
    """Two scopes share no page in whole or in part, and each finds its own."""
    rig = Rig(full(), *others, pages=[12, *[12] * len(others)], max_tokens=16)
    prompt = list(range(10))
    a = rig.start(prompt, scope=mine)
    assert rig.lookup([*prompt, 99], scope=theirs) == 0
    assert rig.lookup([*prompt[:6], 99], scope=theirs) == 0
    b = rig.start(prompt, scope=theirs)
    for name, table in rig.kv.tables.items():
        pages = [set(table.rows[s.row][table.rows[s.row] > 0].tolist()) for s in (a, b)]
        assert not pages[0] & pages[1], name
    rig.kv.suspend([a, b])
    for scope in (mine, theirs):
        assert rig.lookup([*prompt, 99], scope=scope) == 8
    assert rig.kv.resume([a, b])
    rig.engine.prefill([a, b])
    rig.kv.close([a, b])
    assert rig.idle()
