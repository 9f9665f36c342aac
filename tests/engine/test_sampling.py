"""The vectorised sampler against a loop that anybody can check."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtide.engine.request import SamplingParams
from kvtide.engine.sampling import Settings, sample, uniforms
from kvtide.errors import ConfigError


def settings_of(rows: list[tuple[float, float, int, int]]) -> Settings:
    temperature, top_p, seed, position = zip(*rows, strict=True)
    return Settings(
        temperature=np.array(temperature, dtype=np.float64),
        top_p=np.array(top_p, dtype=np.float64),
        seed=np.array(seed, dtype=np.uint64),
        position=np.array(position, dtype=np.int64),
    )


def sample_one(logits: list[float], temperature: float, top_p: float, u: float) -> int:
    """One row, as one would explain it."""
    if temperature == 0.0:
        return max(range(len(logits)), key=lambda i: (logits[i], -i))
    weight = np.exp((np.array(logits) - max(logits)) / temperature)
    probability = weight / weight.sum()
    kept: list[int] = []
    for token in sorted(range(len(logits)), key=lambda i: (-probability[i], i)):
        kept.append(token)
        if sum(probability[kept]) >= top_p:
            break
    target, mass = u * sum(probability[kept]), 0.0
    for token in kept:
        mass += probability[token]
        if target < mass:
            return token
    return kept[-1]


row = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 10_000),
)


@given(rows=st.lists(row, min_size=1, max_size=8), noise=st.integers(0, 2**32))
def test_batch_equals_a_loop_over_rows(
    rows: list[tuple[float, float, int, int]], noise: int
) -> None:
    logits = np.random.default_rng(noise).normal(0.0, 3.0, (len(rows), 37)).astype(np.float32)
    settings = settings_of(rows)
    u = uniforms(settings.seed, settings.position)
    expected = [
        sample_one(logits[i].astype(np.float64).tolist(), rows[i][0], rows[i][1], u[i])
        for i in range(len(rows))
    ]
    assert sample(torch.from_numpy(logits), settings).tolist() == expected


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    rows = [(1.0, 0.9, 7, 3), (0.0, 1.0, 0, 0), (0.7, 1.0, 8, 3), (1.0, 0.9, 7, 4)]
    together = sample(logits, settings_of(rows))
    alone = [int(sample(logits[i : i + 1], settings_of([rows[i]]))[0]) for i in range(4)]
    assert together.tolist() == alone


def test_frequencies_follow_the_probabilities() -> None:
    n = 20_000
    probability = np.array([0.5, 0.3, 0.15, 0.05])
    logits = torch.from_numpy(np.log(probability)).repeat(n, 1)
    ids = sample(logits, settings_of([(1.0, 0.9, 11, position) for position in range(n)]))
    share = np.bincount(ids, minlength=4) / n
    # top_p 0.9 keeps the first three: 0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95
    np.testing.assert_allclose(share, [0.526, 0.316, 0.158, 0.0], atol=0.012)


def test_uniforms_are_uniform_and_differ_by_seed_and_position() -> None:
    position = np.arange(50_000)
    u = uniforms(np.full(50_000, 3, dtype=np.uint64), position)
    other = uniforms(np.full(50_000, 4, dtype=np.uint64), position)
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert abs(u.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(u, other)[0, 1]) < 0.02
    assert len(np.unique(u)) == 50_000


def test_sampling_leaves_the_logits_alone() -> None:
    logits = torch.randn(2, 9)
    before = logits.clone()
    sample(logits, settings_of([(1.0, 0.5, 1, 1), (0.0, 1.0, 0, 0)]))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0.0)],
)
def test_impossible_parameters_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        SamplingParams(**{field: value})  # pyright: ignore[reportArgumentType]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="stop"):
        SamplingParams(stop=("",))
