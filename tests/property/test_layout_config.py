"""Layouts of random configurations: nothing lost or counted twice, over groups, ranks and sizes."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import assume, given
from tests.configs import config

from kvtide import Layout, Parallel
from kvtide.layout import LayerGroup, Window

SIZES = st.sampled_from([1, 2, 3, 4, 8, 16, 64])
KV_DTYPES = st.sampled_from(["bfloat16", "float32", "fp8", "int8"])
BLOCK = 16


@st.composite
def heads(draw: st.DrawFn) -> dict[str, Any]:
    """Full and sliding layers in any order, of sizes of their own, some sharing another's."""
    num = draw(st.integers(2, 12))
    kinds = ["full_attention", "sliding_attention"]
    types = kinds[1:] + [draw(st.sampled_from(kinds)) for _ in range(num - 2)]
    types = [*draw(st.permutations(types)), kinds[0]]  # Gemma 4's last layer is full
    first = max(types.index(kind) for kind in kinds) + 1
    overrides = draw(
        st.dictionaries(
            st.integers(0, num - 1).map(str),
            st.fixed_dictionaries({"head_dim": SIZES}),
            max_size=3,
        )
    )
    return config(
        "gemma4_text",
        num_hidden_layers=num,
        num_attention_heads=64,
        num_key_value_heads=draw(st.sampled_from([1, 2, 4, 8, 64])),
        head_dim=draw(SIZES),
        sliding_window=draw(SIZES),
        layer_types=types,
        num_kv_shared_layers=draw(st.integers(0, num - first)),
        per_layer_config=overrides,
    )


@st.composite
def hybrids(draw: st.DrawFn) -> dict[str, Any]:
    """Mamba, attention and layers without either in any order."""
    return config(
        "nemotron_h",
        hybrid_override_pattern="M*" + draw(st.text("M*-E", max_size=10)),
        num_attention_heads=64,
        num_key_value_heads=draw(st.sampled_from([1, 2, 8])),
        head_dim=draw(SIZES),
        mamba_num_heads=64,
        mamba_head_dim=draw(SIZES),
        ssm_state_size=draw(SIZES),
        n_groups=draw(st.sampled_from([1, 2, 8])),
        conv_kernel=draw(SIZES),
        dtype="bfloat16",
    )


@st.composite
def latents(draw: st.DrawFn) -> dict[str, Any]:
    """Latents with an indexer in some layers."""
    num = draw(st.integers(1, 10))
    pattern = "F" + draw(st.text("FS", min_size=num - 1, max_size=num - 1))
    return config(
        "glm_moe_dsa",
        num_hidden_layers=num,
        kv_lora_rank=draw(SIZES) * 128,
        index_head_dim=draw(SIZES),
        index_topk_pattern=pattern,
    )


MODELS = st.one_of(heads(), hybrids(), latents())


def read(fields: dict[str, Any], kv_dtype: str = "bfloat16", **parallel: int) -> Layout:
    return Layout.from_config(
        fields, block_tokens=BLOCK, kv_dtype=kv_dtype, parallel=Parallel(**parallel)
    )


def payload(group: LayerGroup) -> float:
    return (group.bytes_per_state or 0) + (group.bytes_per_token or 0)


def total(layout: Layout) -> float:
    return sum(payload(group) for group in layout.groups)


def num_layers(fields: dict[str, Any]) -> int:
    return fields.get("num_hidden_layers") or len(fields["hybrid_override_pattern"])


def roles(layout: Layout) -> list[tuple[int, str]]:
    """Every layer with every kind of group it is in."""
    return sorted(
        (layer, group.name.split("_")[0]) for group in layout.groups for layer in group.layers
    )


def expected_roles(fields: dict[str, Any]) -> list[tuple[int, str]]:
    """The same, said by the fields alone."""
    match fields["model_type"]:
        case "gemma4_text":
            own = num_layers(fields) - fields["num_kv_shared_layers"]
            types = enumerate(fields["layer_types"][:own])
            return [(i, "full" if kind[0] == "f" else "window") for i, kind in types]
        case "nemotron_h":
            words = {"M": "state", "*": "full"}
            pattern = enumerate(fields["hybrid_override_pattern"])
            return [(i, words[letter]) for i, letter in pattern if letter in words]
        case _:
            both = enumerate(fields["index_topk_pattern"])
            return sorted(
                (i, kind)
                for i, letter in both
                for kind in (["latent", "indexer"] if letter == "F" else ["latent"])
            )


@given(fields=MODELS, kv_dtype=KV_DTYPES)
def test_groups_have_every_layer_once(fields: dict[str, Any], kv_dtype: str) -> None:
    layout = read(fields, kv_dtype)
    assert roles(layout) == expected_roles(fields)
    for group in layout.groups:
        assert group.page_bytes >= payload(group) * (1 if group.is_state else BLOCK)


@given(fields=MODELS, kv_dtype=KV_DTYPES, data=st.data())
def test_stages_add_up_to_the_whole(
    fields: dict[str, Any], kv_dtype: str, data: st.DataObject
) -> None:
    if fields.get("num_kv_shared_layers"):
        fields = {**fields, "num_kv_shared_layers": 0}  # sharing may forbid a split
    whole = read(fields, kv_dtype)
    caching = {layer for group in whole.groups for layer in group.layers}
    assume(len(caching) > 1)  # a stage that caches nothing is refused
    cut = data.draw(st.integers(min(caching) + 1, max(caching)))
    stages = (cut, num_layers(fields) - cut)
    parts = [
        Layout.from_config(
            fields,
            block_tokens=BLOCK,
            kv_dtype=kv_dtype,
            parallel=Parallel(pipeline=2, stage=stage, stages=stages),
        )
        for stage in range(2)
    ]
    assert sum(map(total, parts)) == total(whole)
    assert sorted(roles(parts[0]) + roles(parts[1])) == roles(whole)


@given(fields=st.one_of(heads(), hybrids()), tensor=st.sampled_from([2, 4, 8]))
def test_tensor_ranks_add_up_to_the_whole(fields: dict[str, Any], tensor: int) -> None:
    """Heads that are not split are on every rank they serve; the rest is there once."""
    whole, part = read(fields), read(fields, tensor=tensor)
    kv_heads = fields["num_key_value_heads"]
    copies = max(1, tensor // kv_heads)
    for ours, theirs in zip(part.groups, whole.groups, strict=True):
        assert ours.layers == theirs.layers
        if not ours.is_state:
            assert payload(ours) * tensor == payload(theirs) * copies
            continue
        groups, size = fields["n_groups"], fields["ssm_state_size"]
        copied = max(0, tensor - groups) * 2 * size * fields["conv_kernel"] * 2
        assert payload(ours) * tensor == payload(theirs) + copied * len(ours.layers)


@given(fields=MODELS, context=st.sampled_from([2, 4, 8]))
def test_context_ranks_add_up_to_the_whole(fields: dict[str, Any], context: int) -> None:
    whole, part = read(fields), read(fields, context=context)
    for ours, theirs in zip(part.groups, whole.groups, strict=True):
        assert payload(ours) * (1 if ours.is_state else context) == payload(theirs)


@given(fields=latents(), tensor=st.sampled_from([2, 4, 8]))
def test_latents_are_on_every_rank(fields: dict[str, Any], tensor: int) -> None:
    assert read(fields, tensor=tensor) == read(fields)


GROWING = {
    "gemma4_text": ("head_dim", "num_key_value_heads"),
    "nemotron_h": ("head_dim", "mamba_head_dim", "ssm_state_size", "conv_kernel", "n_groups"),
    "glm_moe_dsa": ("kv_lora_rank", "index_head_dim", "qk_rope_head_dim"),
}


@given(fields=MODELS, data=st.data())
def test_more_of_anything_is_never_fewer_bytes(fields: dict[str, Any], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(GROWING[fields["model_type"]]))
    assume(fields[name] < 64 or name != "num_key_value_heads")  # as many as query heads
    larger = {**fields, name: fields[name] * 2}
    assert total(read(larger)) >= total(read(fields))
    wider = read(fields, "float32")
    assert total(wider) >= total(read(fields, "fp8"))


@given(fields=heads(), max_tokens=st.integers(1, 100))
def test_windows_nobody_outgrows_are_full(fields: dict[str, Any], max_tokens: int) -> None:
    layout = Layout.from_config(
        fields, block_tokens=BLOCK, kv_dtype="float32", max_tokens=max_tokens
    )
    windows = [group for group in layout.groups if isinstance(group.lifetime, Window)]
    assert bool(windows) == (fields["sliding_window"] < max_tokens)
    assert total(layout) == total(read(fields, "float32"))
