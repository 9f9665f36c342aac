"""What attention costs per layer group, by hand from published configurations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.configs import DEEPSEEK_V4, GEMMA_3N
from tests.sim.costs.published import LLAMA_8B, config_of

from kvtide.layout import Layout, Parallel, Speculative
from kvtide.sim.costs import Clock, ModelCost, Reads, Weights, hardware

CHIP = hardware("h200")


def reads_of(config: dict[str, Any], **given: Any) -> dict[str, Reads]:
    layout = Layout.from_config(config, block_tokens=128, kv_dtype="bfloat16", **given)
    cost = ModelCost.from_config(config, layout, params=1e9, weight_dtype="bfloat16")
    return {f"{reads.group}{'_picked' * reads.picks}": reads for reads in cost.reads}


def test_full_attention() -> None:
    (full,) = reads_of(dict(LLAMA_8B)).values()
    assert full.pair_flops == 32 * 4 * 32 * 128
    assert full.token_bytes == 32 * 2 * 8 * 128 * 2
    assert (full.limit, full.picks) == (None, False)


def test_windows() -> None:
    reads = reads_of(config_of("gpt-oss-20b"))
    assert reads["window_128"].limit == 128
    assert reads["window_128"].pair_flops == reads["full"].pair_flops == 12 * 4 * 64 * 64
    assert reads["full"].limit is None


def test_latents_and_their_indexer() -> None:
    reads = reads_of(config_of("DeepSeek-V3.2"))
    latent, indexer = reads["latent_picked"], reads["indexer"]
    assert latent.pair_flops == 61 * 2 * 128 * (512 + 64 + 512)
    assert latent.limit == 2048
    assert latent.token_bytes == 61 * 576 * 2
    assert indexer.pair_flops == 61 * 2 * 64 * 128
    assert (indexer.limit, indexer.token_bytes) == (None, 61 * (128 + 4))
    (plain,) = reads_of(config_of("DeepSeek-V3")).values()
    assert (plain.pair_flops, plain.limit) == (latent.pair_flops, None)


def test_chunks_widen_latents_where_that_pays() -> None:
    (latent,) = reads_of(config_of("DeepSeek-V3")).values()
    assert latent.wide_pair_flops == 61 * 2 * 128 * (128 + 64 + 128)
    assert latent.widen_flops == 61 * 2 * 128 * 512 * (128 + 128)
    clock = Clock(ModelCost(weights=Weights(dense=0, head=0, embedding=0), reads=(latent,)), CHIP)
    starts, new = np.array([1000]), np.array([2048])
    pairs = sum(range(1001, 1000 + 2048 + 1))
    widened = 3048 * latent.widen_flops + pairs * latent.wide_pair_flops
    assert clock.flops(starts, new) == widened < pairs * latent.pair_flops
    few = np.array([4])
    assert clock.flops(starts, few) == (1001 + 1002 + 1003 + 1004) * latent.pair_flops
    assert reads_of(config_of("DeepSeek-V3.2"))["latent_picked"].widen_flops == 0


def test_folded_entries_cost_per_token_what_they_fold() -> None:
    more = {"index_topk": 512, "index_n_heads": 64, "n_routed_experts": 2, "hidden_size": 4096}
    reads = reads_of({**DEEPSEEK_V4, **more})
    assert reads["compressed_4_picked"].limit == 512 * 4
    layers = 21
    assert reads["compressed_4_picked"].pair_flops == layers * 2 * 64 * 2 * 512 / 4
    assert reads["compressed_128"].pair_flops == 20 * 2 * 64 * 2 * 512 / 128
    assert reads["window_128"].limit == 128


def test_layers_that_borrow_keys_read_them_again() -> None:
    reads = reads_of({**GEMMA_3N, "hidden_size": 2048})
    layers = sum(r.pair_flops for r in reads.values()) / (4 * 8 * 256)
    assert layers == 35
    assert sum(r.token_bytes for r in reads.values()) == 35 * 2 * 2 * 256 * 2


def test_a_rank_reads_its_share_of_the_heads() -> None:
    layout = Layout.from_config(dict(LLAMA_8B), block_tokens=16, parallel=Parallel(tensor=4))
    (full,) = ModelCost.from_config(dict(LLAMA_8B), layout, ranks=4).reads
    assert full.pair_flops == 32 * 4 * 8 * 128
    assert full.token_bytes == 32 * 2 * 2 * 128 * 2


def test_a_drafters_groups_are_left_out() -> None:
    config = config_of("DeepSeek-V3.2")
    layout = Layout.from_config(config, block_tokens=64, speculative=Speculative(tokens=1))
    assert {group.name for group in layout.groups} > {"mirror", "mirror_indexer"}
    cost = ModelCost.from_config(config, layout)
    assert [reads.group for reads in cost.reads] == ["latent", "indexer"]
    assert cost.write_bytes == 61 * (576 * 2 + 128 + 4)


def test_states_cost_the_same_at_every_length() -> None:
    config = config_of("Qwen3-Next-80B-A3B-Instruct")
    layout = Layout.from_config(config, block_tokens=64)
    cost = ModelCost.from_config(config, layout)
    recurrent, conv = 36 * 32 * 128 * 128, 36 * (2 * 16 * 128 + 32 * 128) * 4
    assert cost.state_flops == 6 * recurrent + 2 * conv
    assert cost.state_bytes == 2 * (4 * recurrent + 2 * conv)
    (full,) = cost.reads
    assert full.pair_flops == 12 * 4 * 16 * 256


@pytest.mark.parametrize("name", ["gpt-oss-20b", "DeepSeek-V3.2", "Kimi-Linear-48B-A3B-Instruct"])
def test_decoding_longer_contexts_takes_longer(name: str) -> None:
    config = config_of(name)
    model = ModelCost.from_config(config, Layout.from_config(config, block_tokens=64))
    clock, rows = Clock(model, hardware("h200")), np.full(64, 1000, np.int64)
    near, far = clock.decode_seconds(rows, 1), clock.decode_seconds(rows + 100_000, 1)
    assert far[0] > near[0]
