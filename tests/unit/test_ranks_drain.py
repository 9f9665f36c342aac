"""Stages of a pipeline stop beginning micro-batches at the same step, whoever has a say."""

from __future__ import annotations

from tests.tiny import Rig, full, window

from kvtide.ranks import Agreement, Change, LocalHub, Terms, Turn


def test_all_stages_drain_although_one_refuses() -> None:
    hub, turns = LocalHub(2), [list[Turn](), list[Turn]()]
    groups: list[Agreement] = []
    for transport in hub.ranks():
        kv = Rig(full(), window(8), pages=[8, 6], max_tokens=16, mode="static").kv
        refuses = transport.rank == 0
        groups.append(
            Agreement(
                kv,
                transport,
                Terms(axis="pipeline", mode="leader", every=1),
                allow=lambda _, refuses=refuses: not refuses,
            )
        )
    pages = {name: pool.num_usable for name, pool in groups[0].kv.pools.items()}
    groups[0].propose(Change(pages={"full": pages["full"] - 1}))
    for _ in range(4):
        for group, seen in zip(groups, turns, strict=True):
            seen.append(group.boundary())
    assert turns[0] == turns[1]
    assert [turn.drain for turn in turns[0]] == [False, True, False, False]
    assert turns[0][2].refused == "veto"
    assert {name: pool.num_usable for name, pool in groups[1].kv.pools.items()} == pages
