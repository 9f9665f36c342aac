"""Policies by themselves: targets of average lengths, equal pages, empty large pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.sim.plain import FULL, STATE, WINDOW

from kvtide.layout import FullSpec, Layout, State
from kvtide.sim.policies import POLICIES, Ground
from kvtide.sim.policies.one_size import WhenEmpty, large_granule, padded_layout, page_granule
from kvtide.sim.policies.periodic import COOL_DOWN, Periodic, moves, target

if TYPE_CHECKING:
    from kvtide.rebalance import Move

BLOCK = 4


def layout(*specs: Any, copies: int = 1) -> Layout:
    layers = dict(enumerate(spec for spec in specs for _ in range(copies)))
    return Layout.from_layers(layers, block_tokens=BLOCK)


def ground(*specs: Any, num_granules: int = 100, max_tokens: int = 64) -> Ground:
    return Ground(
        layout=layout(*specs),
        num_granules=num_granules,
        granule_bytes=1024,
        max_tokens=max_tokens,
    )


def test_the_target_suits_a_sequence_of_the_average_length() -> None:
    # pages are granules; floors: 64 / 4 + sink = 17, and 3 blocks of the window + sink = 4
    # 40 tokens hold 10 pages of full attention and 2 of the window (tokens 32 to 39):
    # of the 79 that are left 79 x 10 / 12 = 65.8 and 13.2
    assert target(ground(FULL, WINDOW), 40) == {"full": 17 + 66, "window_8": 4 + 13}


def test_a_state_stays_a_state_however_long() -> None:
    short, long = (target(ground(FULL, STATE), length) for length in (8, 60))
    assert short["state"] > long["state"]
    assert sum(short.values()) == sum(long.values()) == 100


def test_moves_turn_one_split_into_another() -> None:
    held, wanted = {"a": 10, "b": 50, "c": 40}, {"a": 55, "b": 30, "c": 15}
    plan = moves(held, wanted, "why")
    for move in plan:
        held[move.donor] -= move.granules
        held[move.receiver] += move.granules
    assert held == wanted
    assert {move.reason for move in plan} == {"why"}
    assert moves(wanted, wanted, "why") == ()


@dataclass
class Pool:
    granules: int = 0
    evicted: int = 0
    page_bytes: int = 1024
    empty_granules: int = 0
    free: int = 1000


@dataclass
class Facts:
    pools: dict[str, Pool]


def test_average_lengths_decide_late_and_seldom() -> None:
    facts = Facts({"full": Pool(granules=50), "window_8": Pool(granules=50)})
    decider = Periodic(ground(FULL, WINDOW), min_samples=200)
    for _ in range(199):
        decider.ended(30, 10)
    assert decider.plan(1000.0, lambda: facts) == ()  # too few samples
    decider.ended(30, 10)
    assert decider.plan(COOL_DOWN / 2, lambda: facts) == ()  # too early
    for _ in range(99):
        decider.ended(30, 10)
    assert decider.plan(1000.0, lambda: facts) == ()  # not a hundred more
    decider.ended(30, 10)
    (move,) = decider.plan(1000.0, lambda: facts)
    assert (move.donor, move.receiver, move.granules) == ("window_8", "full", 33)
    assert "40 tokens long" in move.reason
    suits = Facts({"full": Pool(granules=80), "window_8": Pool(granules=20)})
    for _ in range(100):
        decider.ended(30, 10)
    assert decider.plan(2000.0, lambda: suits) == ()  # within 1.25 of the target


@pytest.mark.parametrize("specs", [(FULL, WINDOW), (FULL, STATE), (FULL, WINDOW, STATE)])
def test_padded_pages_are_equal(specs: tuple) -> None:
    plain = layout(*specs, copies=3)
    padded = padded_layout(plain)
    sizes = {group.page_bytes for group in padded.groups}
    assert len(sizes) == 1
    assert sizes == {page_granule(padded, 1)}
    layers = sorted(layer for group in padded.groups for layer in group.layers)
    assert layers == sorted(layer for group in plain.groups for layer in group.layers)
    assert {type(g.lifetime) for g in padded.groups} == {type(g.lifetime) for g in plain.groups}
    for group in padded.groups:
        if isinstance(group.lifetime, State):
            assert group.bytes_per_state is not None
            assert group.bytes_per_state >= 3 * 1024


def test_padded_states_are_kept_where_the_longer_blocks_end() -> None:
    # a state of 3,072 bytes, 256 a token of attention: blocks of 12 tokens, states every 8
    thin = FullSpec(kv_heads=1, head_dim=32, dtype="float32")
    wide = replace(STATE, buffers=(replace(STATE.buffers[0], shape=(768,)),))
    padded = padded_layout(layout(thin, wide))
    assert {group.block_tokens for group in padded.groups} == {12}
    assert [g.lifetime for g in padded.groups if g.is_state] == [State(12)]


def test_full_attention_alone_needs_no_padding() -> None:
    plain = layout(FULL, FullSpec(kv_heads=2, head_dim=32, dtype="float32"))
    assert padded_layout(plain) is plain


def test_large_pages_are_divided_by_all() -> None:
    groups = layout(FULL, WINDOW, STATE, copies=2)
    large = large_granule(groups, 1)
    assert all(large % group.page_bytes == 0 for group in groups.groups)


def test_only_empty_large_pages_change_pools() -> None:
    decider = WhenEmpty(ground(FULL, WINDOW))
    pools = {
        "full": Pool(evicted=5, empty_granules=0),
        "window_8": Pool(evicted=1, empty_granules=4),
    }

    def ask() -> tuple[Move, ...]:
        plans = [decider.plan(0.0, lambda: Facts(pools)) for _ in range(4)]
        return next((plan for plan in plans if plan), ())

    (move,) = ask()
    assert (move.donor, move.receiver, move.granules) == ("window_8", "full", 3)
    assert ask() == ()  # nobody evicted since
    pools["window_8"].evicted += 1
    assert ask() == ()  # the other has none that is empty


def test_there_are_the_policies_of_the_field() -> None:
    assert list(POLICIES) == ["static", "elastic", "periodic", "padded", "lcm", "infinite"]
