"""`plan_capacity`: the worked example to the byte, the JSON, pipelines, odd layouts, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny import draft, full, indexer, state, window

from kvtide import ConfigError, Layout
from kvtide.layout import Parallel
from kvtide.planner import Options, Request, Workload, plan_capacity, plan_layouts

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
GB = 10**9
GRANULE = 1024
CHAT = Workload(requests=(Request(input_tokens=2000, output_tokens=300),), concurrency=64)


def test_the_worked_example_to_the_byte() -> None:
    """60 GB cut 85 / 15 while traffic needs 4 GB of index keys."""
    plan = plan_capacity(
        CONFIGS / "gqa-indexer.json",
        memory=60 * GB,
        pool_ratio={"full": 0.85, "indexer": 0.15},
        needs={"indexer": 4 * GB},
    )
    attention, index = plan.stage.groups
    assert attention.bytes_per_token == 2 * 32 * 8 * 128 * 2 == 131_072  # K and V, fp16
    assert index.bytes_per_token == 32 * 128 * 2
    verdict = plan.stage.verdict
    assert verdict is not None
    assert [pool.bytes for pool in verdict.pools] == [51_000_000_000, 9_000_000_000]
    assert [pool.stranded_bytes for pool in verdict.pools] == [0, 5_000_000_000]
    assert verdict.stranded_bytes == 5_000_000_000
    assert verdict.bytes_per_token == 131_072
    assert verdict.stranded_tokens == 38_147  # 5e9 / 131,072 = 38,146.97
    assert verdict.stranded_prefixes == 19  # 5e9 / (2,000 x 131,072) = 19.07
    # 60e9 bytes are 28,610 granules of 2 MiB: 24,318.5 and 4,291.5 of them, the odd one to the
    # larger share.
    assert [pool.granules for pool in verdict.pools] == [24_319, 4_291]
    assert [pool.rounding_bytes for pool in verdict.pools] == [
        51 * GB - 24_319 * 2**21,
        9 * GB - 4_291 * 2**21,
    ]


def test_prefixes_are_whole_ones() -> None:
    plan = plan_capacity(
        CONFIGS / "gqa-indexer.json",
        memory=60 * GB,
        pool_ratio=(0.85, 0.15),
        needs={"indexer": 4_100_000_000},
    )
    verdict = plan.stage.verdict
    assert verdict is not None
    assert verdict.stranded_bytes == 4_900_000_000
    assert verdict.stranded_prefixes == 18  # 18.69


def test_shares_without_names_are_in_the_order_of_the_pools() -> None:
    asked: dict[str, Any] = {"memory": 60 * GB, "needs": {"indexer": 4 * GB}}
    named = {"indexer": 0.15, "full": 0.85}
    config = CONFIGS / "gqa-indexer.json"
    first = plan_capacity(config, pool_ratio=named, **asked)
    assert first == plan_capacity(config, pool_ratio=(0.85, 0.15), **asked)


def test_the_json_has_the_keys_it_promises() -> None:
    data = plan_capacity(CONFIGS / "full-state.json", memory=20 * GB, workload=CHAT).to_json()
    assert json.loads(json.dumps(data)) == data
    assert data["model"] == "full-state"
    assert data["block_tokens"] == 16
    assert data["parallel"] == {"tensor": 1, "pipeline": 1, "context": 1, "attention_data": 1}
    # 6 layers of full attention, 2 heads of 256 for K and V in bfloat16.
    assert data["kv_bytes_per_token"] == 6 * 2 * 2 * 256 * 2
    groups = {group["name"]: group for group in data["groups"]}
    assert groups["full"]["lifetime"] == "full"
    assert groups["full"]["layers"] == 6
    assert groups["full"]["bytes_per_token"] == 12_288
    assert groups["full"]["bytes_per_state"] is None
    assert groups["full"]["page_bytes"] == 16 * 12_288
    assert groups["full"]["window"] is None
    assert groups["state"]["lifetime"] == "state"
    assert groups["state"]["bytes_per_token"] is None
    assert data["state_bytes_per_sequence"] == groups["state"]["bytes_per_state"] > 0
    assert {pool["name"] for pool in data["pools"]} == {"full", "state"}
    assert "stages" not in data


def test_whole_numbers_are_ints() -> None:
    data = plan_capacity(CONFIGS / "gqa-indexer.json", memory=60 * GB, workload=CHAT).to_json()

    def floats(value: object) -> list[float]:
        match value:
            case float():
                return [value]
            case dict():
                return [found for inner in value.values() for found in floats(inner)]
            case list():
                return [found for inner in value for found in floats(inner)]
            case _:
                return []

    found = floats(data)
    assert found
    assert not [value for value in found if value.is_integer()]


def test_a_full_window_adds_nothing() -> None:
    data = plan_capacity(CONFIGS / "full-window.json").to_json()
    window_group, full_group = data["groups"]
    assert (window_group["name"], window_group["window"]) == ("window_128", 128)
    assert window_group["bytes_per_token"] == full_group["bytes_per_token"] == 12 * 2 * 8 * 64 * 2
    assert data["kv_bytes_per_token"] == 24_576
    short, *_, longest = data["lengths"]
    # 1,024 tokens: 64 blocks in full; the last token reads 896 to 1,023, blocks 56 to 63.
    assert short["bytes_by_pool"] == {"window_128": 8 * 393_216, "full": 64 * 393_216}
    assert short["next_token_bytes"] == longest["next_token_bytes"] == 24_576
    assert longest["length"] == 131_072
    assert data["memory_bytes"] is None
    assert short["sequences"] is None


def test_the_most_a_model_can_bounds_a_plan() -> None:
    plan = plan_capacity(CONFIGS / "full-window.json", max_tokens=100)
    assert plan.max_tokens == 100
    # No sequence can outgrow the window of 128, so it is full attention, and one group.
    assert [group.name for group in plan.stage.groups] == ["full"]
    assert [length.length for length in plan.lengths] == [100]


def test_a_drafter_is_a_mirror() -> None:
    plan = plan_layouts("m", [layout_of(full(), draft(3))], 64, Options(block_tokens=4))
    assert [group.lifetime for group in plan.stage.groups] == ["full", "mirror"]
    assert plan.stage.groups[1].look_ahead == 3
    assert plan.stage.kv_bytes_per_token == 64 + 64


def layout_of(*specs: Any) -> Layout:
    return Layout.from_layers(dict(enumerate(specs)), block_tokens=4)


def small(granules: int, **fields: Any) -> Options:
    return Options(memory=granules * GRANULE, granule_bytes=GRANULE, **fields)


CHATS = Workload(requests=(Request(input_tokens=36, output_tokens=4),), concurrency=8)


def test_the_stage_that_holds_the_fewest_decides() -> None:
    stages = [layout_of(full()), layout_of(full(), full()), layout_of(full(), window(8))]
    asked = small(40, parallel=Parallel(pipeline=3), workload=replace(CHATS, concurrency=None))
    plan = plan_layouts("m", stages, 64, asked)
    assert plan.binding == 1
    found = [stage.split.sequences for stage in plan.stages if stage.split]
    # 40 tokens are 10 pages of 256 bytes: 159 // 10; of 512: 79 // 10; of 256 and 2 of a window.
    assert found == [15, 7, 13]
    assert plan.sequences == 7
    assert plan.lengths[-1].stage == 1
    data = plan.to_json()
    assert [stage["stage"] for stage in data["stages"]] == [0, 1, 2]
    assert data["kv_bytes_per_token"] == 128
    assert data["capacity"]["binding_stage"] == 1


def test_each_length_has_its_own_binding_stage() -> None:
    stages = [layout_of(state(1000)), layout_of(full())]
    plan = plan_layouts("m", stages, 2000, small(400, parallel=Parallel(pipeline=2)))
    assert [(length.length, length.stage) for length in plan.lengths] == [(1024, 1), (2000, 1)]
    short = plan_layouts("m", stages, 100, small(400, parallel=Parallel(pipeline=2)))
    # 100 tokens: 25 pages of 256 bytes or 2 states of 4,000.
    assert short.lengths[0].stage == 0
    assert short.lengths[0].sequences == (400 * 1024 // 4000 - 1) // 2


def test_attention_data_parallel_copies_multiply_sequences() -> None:
    alone = plan_layouts("m", [layout_of(full())], 64, small(40, workload=CHATS))
    copies = Parallel(attention_data=4)
    four = plan_layouts("m", [layout_of(full())], 64, small(40, workload=CHATS, parallel=copies))
    assert alone.sequences == alone.total_sequences == 8
    assert (four.sequences, four.total_sequences) == (2, 8)  # 8 over 4 copies
    fit = alone.lengths[0].sequences or 0
    assert four.lengths[0].total_sequences == 4 * fit
    assert four.lengths[0].total_tokens == 4 * fit * 64
    assert four.stage.groups == alone.stage.groups
    assert four.prefixes is not None
    assert four.total_prefixes == 4 * four.prefixes


def test_context_parallel_ranks_share_every_block() -> None:
    alone = plan_capacity(CONFIGS / "gqa-indexer.json", memory=60 * GB)
    four = plan_capacity(CONFIGS / "gqa-indexer.json", memory=60 * GB, parallel=Parallel(context=4))
    assert four.stage.kv_bytes_per_token == alone.stage.kv_bytes_per_token / 4
    assert (four.lengths[-1].sequences or 0) >= 4 * (alone.lengths[-1].sequences or 0) > 0


def test_the_memory_a_workload_needs() -> None:
    plan = plan_layouts("m", [layout_of(full(), window(8))], 64, small(40, workload=CHATS))
    # 8 sequences: 81 pages of 256 bytes are 21 granules, 1 + 16 are 5.
    assert plan.stage.workload_bytes == 26 * GRANULE
    enough = plan_layouts("m", [layout_of(full(), window(8))], 64, small(26, workload=CHATS))
    assert enough.sequences == 8
    less = plan_layouts("m", [layout_of(full(), window(8))], 64, small(25, workload=CHATS))
    assert less.sequences == 7


def test_memory_below_the_floors_says_how_much_is_lacking() -> None:
    layout = layout_of(full(), window(8))
    # 64 tokens: 16 pages and the sink are 5 granules of 4; 3 and the sink are 1.
    plan = plan_layouts("m", [layout], 64, small(6))
    assert plan.fits
    assert [pool.floor_pages for pool in plan.stage.pools] == [16, 3]
    assert [pool.floor_bytes for pool in plan.stage.pools] == [5 * GRANULE, GRANULE]
    lacking = plan_layouts("m", [layout], 64, small(4))
    assert not lacking.fits
    assert lacking.stage.floors.lacking_bytes == 2 * GRANULE
    assert lacking.to_json()["fits"] is False
    # What is left of memory after the last whole granule serves nobody.
    odd = plan_layouts("m", [layout], 64, Options(memory=6 * GRANULE - 1, granule_bytes=GRANULE))
    assert odd.stage.floors.lacking_bytes == GRANULE


def test_a_split_below_a_floor_names_the_pool() -> None:
    asked = small(10, pool_ratio={"full": 0.4, "window_8": 0.6})
    plan = plan_layouts("m", [layout_of(full(), window(8))], 64, asked)
    assert not plan.fits
    assert plan.stage.floors.lacking_bytes == 0
    assert plan.stage.floors.lacking == {"full": 5 * GRANULE - 4096}


def test_the_last_block_is_counted_whole() -> None:
    (length,) = plan_layouts("m", [layout_of(full())], 10, small(40)).stage.lengths
    assert (length.bytes, length.bytes_per_token) == (3 * 256, 76.8)


def test_one_group_strands_nothing_and_takes_all() -> None:
    asked = small(40, workload=CHATS, pool_ratio=(1.0,))
    plan = plan_layouts("m", [layout_of(full())], 64, asked)
    assert plan.stage.split is not None
    assert plan.stage.split.ratio == {"full": 1.0}
    assert plan.stage.verdict is not None
    assert plan.stage.verdict.stranded_bytes == 0


def test_states_alone_have_no_bytes_a_token() -> None:
    plan = plan_layouts("m", [layout_of(state(64))], 4096, small(40, workload=CHATS))
    assert plan.stage.kv_bytes_per_token == 0
    assert {length.bytes for length in plan.stage.lengths} == {2 * 256}
    assert {length.sequences for length in plan.lengths} == {(160 - 1) // 2}
    assert {length.next_token_bytes for length in plan.stage.lengths} == {0}


def test_a_page_larger_than_a_granule() -> None:
    plan = plan_layouts("m", [layout_of(full(), state(1000))], 64, small(60, workload=CHATS))
    pool = plan.stage.pools[1]
    assert (pool.page_bytes, pool.granules_per_page) == (4000, 4000 / 1024)
    # Multiples of 4,000 over multiples of 1,024 leave multiples of their divisor 32.
    assert pool.slack_bytes == 1024 - 32
    assert plan.sequences is not None
    assert plan.sequences < 8


@given(st.integers(1, 60), st.integers(1, 60))
def test_slack_is_the_most_that_a_last_granule_leaves(page: int, granule: int) -> None:
    layout = Layout.from_layers({0: full(page)}, block_tokens=2)
    (pool,) = plan_layouts("m", [layout], 64, Options(granule_bytes=16 * granule)).stage.pools
    unit = 16 * granule
    left = {-count * pool.page_bytes % unit for count in range(unit)}
    assert pool.slack_bytes == max(left)


def test_a_window_longer_than_any_sequence_counts_as_full() -> None:
    wide = plan_layouts("m", [layout_of(window(500))], 64, small(40))
    plain = plan_layouts("m", [layout_of(full())], 64, small(40))
    assert wide.lengths == plain.lengths
    assert wide.stage.pools[0].floor_pages == plain.stage.pools[0].floor_pages


def test_padding_is_the_alignment_of_tensors() -> None:
    # A key and a value of 5 float32 for 1 token are 20 bytes each, aligned to 32.
    layout = Layout.from_layers({0: full(5), 1: full(5)}, block_tokens=1)
    (group,) = plan_layouts("m", [layout], 64, small(40)).stage.groups
    assert (group.page_bytes, group.padding_bytes) == (2 * 2 * 32, 2 * 2 * 12)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"pool_ratio": (0.5, 0.3, 0.2)}, "pool_ratio has 3 shares, but there are 2 pools: full"),
        ({"pool_ratio": {"full": 1.0}}, "pool_ratio says nothing of window_8"),
        ({"pool_ratio": {"full": 0.5, "x": 0.5}}, "pool_ratio names 'x'; the pools are full, wind"),
        ({"pool_ratio": (0.5, 0.6)}, "pool_ratio sums to 1.1"),
        ({"pool_ratio": (1.0, 0.0)}, r"pool_ratio\['window_8'\] is 0.0"),
        ({"needs": {"keys": 1}}, "needs names 'keys'; the pools are full, window_8"),
        ({"needs": {"full": 10**9}}, "needs are 1,000,000,000 bytes together, but memory is"),
    ],
)
def test_questions_about_pools_there_are_not(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_layouts("m", [layout_of(full(), window(8))], 64, small(40, **fields))


def test_a_configuration_without_a_length_needs_one() -> None:
    config = json.loads((CONFIGS / "gqa-indexer.json").read_text())
    del config["max_position_embeddings"]
    with pytest.raises(ConfigError, match="has no max_position_embeddings; give max_tokens"):
        plan_capacity(config)
    assert plan_capacity(config, max_tokens=64).model == "minimax_m3"


def test_a_split_that_a_stage_has_no_pools_for_names_the_stage() -> None:
    stages = [layout_of(full(), window(8)), layout_of(full())]
    asked = small(40, parallel=Parallel(pipeline=2), pool_ratio=(0.5, 0.5))
    with pytest.raises(ConfigError, match="on stage 1 of 2: pool_ratio has 2 shares, but there"):
        plan_layouts("m", stages, 64, asked)


def test_layers_that_draft_may_be_said() -> None:
    config = CONFIGS / "gqa-indexer.json"
    plan = plan_capacity(config, draft_tokens=2, draft_layers=3)
    mirrors = [group for group in plan.stage.groups if group.lifetime == "mirror"]
    assert {group.layers for group in mirrors} == {3}
    with pytest.raises(ConfigError, match="draft_layers is 3 and draft_tokens 0"):
        plan_capacity(config, draft_layers=3)


def test_a_folder_gives_its_name_to_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text((CONFIGS / "gqa-indexer.json").read_text())
    assert plan_capacity(str(folder)).model == "my-model"
    assert plan_capacity(folder / "config.json").model == "my-model"


@given(
    st.integers(6, 200),
    st.integers(0, 100),
    st.sampled_from([(full(),), (full(), window(8)), (full(), state()), (window(8), indexer())]),
)
def test_more_memory_never_fits_fewer_of_any_length(
    granules: int, more: int, specs: tuple[Any, ...]
) -> None:
    less = plan_layouts("m", [layout_of(*specs)], 2000, small(granules))
    much = plan_layouts("m", [layout_of(*specs)], 2000, small(granules + more))
    for a, b in zip(less.lengths, much.lengths, strict=True):
        assert a.sequences is not None
        assert b.sequences is not None
        assert a.sequences <= b.sequences
