"""Stages of a pipeline that keep books for groups they have no layers of."""

from __future__ import annotations

import pytest
from tests.configs import QWEN3_NEXT, config, read

from kvtide import ConfigError, KVManager, NullMemory, Options, Parallel, Speculative
from kvtide.layout import FullSpec, Layout, with_groups_of
from kvtide.ranks import fingerprint_of


def stages(fields: dict[str, object], *counts: int, **options: object) -> list[Layout]:
    whole = read(fields, **options)
    parallel = [Parallel(pipeline=len(counts), stages=counts, stage=s) for s in range(len(counts))]
    return [with_groups_of(read(fields, parallel=p, **options), whole) for p in parallel]


def test_every_stage_has_the_groups_of_the_model_in_its_order() -> None:
    whole = read(QWEN3_NEXT)
    bare = read(QWEN3_NEXT, parallel=Parallel(pipeline=2, stages=(3, 45)))
    assert [group.name for group in bare.groups] == ["state"]
    first, second = stages(QWEN3_NEXT, 3, 45)
    for layout in (first, second):
        for group, of_model in zip(layout.groups, whole.groups, strict=True):
            assert (group.name, group.lifetime) == (of_model.name, of_model.lifetime)
            assert group.block_tokens == of_model.block_tokens
    assert first.group("state") == bare.group("state")
    assert first.group("full").page_bytes == 64  # a byte a token
    own = read(QWEN3_NEXT, parallel=Parallel(pipeline=2, stages=(3, 45), stage=1))
    assert [group.name for group in own.groups] == ["full", "state"]
    assert second.groups == (own.group("state"), own.group("full"))
    assert fingerprint_of(first, "pipeline") == fingerprint_of(second, "pipeline")


def test_a_group_has_the_name_it_has_in_the_model_also_where_it_is_the_first_of_its_kind() -> None:
    wide = FullSpec(kv_heads=1, head_dim=16, dtype="float32")
    narrow = FullSpec(kv_heads=1, head_dim=8, dtype="float32")
    whole = Layout.from_layers({0: wide, 1: narrow}, block_tokens=4)
    last = Layout.from_layers({1: narrow}, block_tokens=4)
    assert [group.name for group in whole.groups] == ["full", "full_2"]
    assert [group.name for group in last.groups] == ["full"]
    placed = with_groups_of(last, whole)
    assert [group.name for group in placed.groups] == ["full", "full_2"]
    assert placed.group("full_2").page_bytes == last.group("full").page_bytes
    assert placed.group("full").page_bytes == 16


def test_a_drafter_on_the_last_stage_has_books_on_all() -> None:
    fields = config("llama", num_hidden_layers=4, head_dim=64, num_key_value_heads=2)
    first, last = stages(fields, 2, 2, speculative=Speculative(tokens=3, draft=fields))
    assert [group.name for group in first.groups] == ["full", "mirror"]
    assert first.group("mirror").lifetime == last.group("mirror").lifetime
    assert first.group("mirror").page_bytes == 64 < last.group("mirror").page_bytes


def test_a_state_placeholder_is_a_page_of_the_least_size() -> None:
    _, last = stages({**QWEN3_NEXT, "num_hidden_layers": 4}, 3, 1)
    assert last.group("state").page_bytes == 16
    assert last.group("state").is_state


def test_a_manager_runs_on_a_stage_with_placeholders() -> None:
    _, last = stages({**QWEN3_NEXT, "num_hidden_layers": 4}, 3, 1)
    kv = KVManager(last, NullMemory(64 << 20, 1 << 20), max_tokens=4096, options=Options())
    seq = kv.open(range(1000))
    assert kv.admit([seq])
    with kv.step([seq], kv.chunk(seq, 1000)):
        pass
    kv.check()


def test_a_stage_of_another_model_is_refused() -> None:
    whole = read(QWEN3_NEXT)
    with pytest.raises(ConfigError, match="same options"):
        with_groups_of(read(QWEN3_NEXT, kv_dtype="float16"), whole)
    with pytest.raises(ConfigError, match="same options"):
        with_groups_of(read(QWEN3_NEXT, block_tokens=32), whole)
