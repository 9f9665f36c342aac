"""What `kvtide replay` prints of runs made by hand, to the letter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.cli.replay_runs import comparison, run, silent, worked_example

from kvtide.cli.replay.metrics import best, cost, metrics_of, split_of
from kvtide.cli.replay.page import draw_page
from kvtide.cli.replay.text import report

WORKED = """\
gqa-indexer on conversation & code: 50 requests, 1,000,000 prompt and 5,050 answer tokens, \
60.000 GB of caches
hardware h100, chunk tokens 8,192

                          static    elastic    infinite
  hit rate                31.2 %     36.0 % *    36.6 %
  recomputed tokens       12,345          0 *         0
  recomputed TFLOP        246.90       0.00 *      0.00
  TTFT p50               8.000 s    4.000 s *   2.000 s
  TTFT p99              14.000 s    7.000 s *   3.500 s
  ITL p50               100.0 ms    50.0 ms *   25.0 ms
  ITL p99               100.0 ms    50.0 ms *   25.0 ms
  throughput, tokens/s      8.42       8.42        8.42
  goodput, requests/s       0.03       0.06 *      0.08
  preemptions                 17          3 *         0
  refusals by full           120         20 *         0
  refusals by indexer          0 *        2           0
  stranded                 8.3 %      0.0 % *     0.0 %
  granules moved               0      2,410           0
  longest pause           0.0 ms     4.2 ms      0.0 ms
  * best; infinite: cannot be run, so not marked

The fixed split (full 85.0 % / indexer 15.0 %) leaves 5.000 GB (8.3 %) stranded on average, \
elastic 0 B (0.0 %), and computes 48,000 prompt tokens more than elastic: hit rate 31.2 % instead \
of 36.0 %, TTFT p99 14.000 s instead of 7.000 s, goodput 0.03 instead of 0.06 requests a second."""

ALONE = """\
gqa-indexer on conversation & code: 50 requests, 1,000,000 prompt and 5,050 answer tokens, \
60.000 GB of caches
hardware h100, chunk tokens 8,192

                        static
  hit rate              30.0 %
  recomputed tokens        700
  recomputed TFLOP        0.00
  TTFT p50                   -
  TTFT p99                   -
  ITL p50                    -
  ITL p99                    -
  throughput, tokens/s    0.00
  goodput, requests/s     0.00
  preemptions                0
  failed requests           50
  stranded              25.0 %
  granules moved             0
  longest pause         0.0 ms

The fixed split (full 85.0 % / indexer 15.0 %) leaves 15.000 GB (25.0 %) stranded on average, \
finds 30.0 % of all prompt tokens in the cache and computes 700 tokens that had been computed \
before."""


def test_three_policies_side_by_side() -> None:
    assert "\n".join(report(worked_example())) == WORKED


def test_one_policy_of_which_nothing_was_answered() -> None:
    alone = silent("static")
    totals = replace(alone.totals, stranded_share=0.25, recomputed_tokens=700)
    assert "\n".join(report(comparison(replace(alone, totals=totals)))) == ALONE


def test_a_split_that_costs_nothing_is_said_to_compute_less() -> None:
    sentence = cost([run("static", hits=0.4), run("elastic", hits=0.3)])
    assert "computes 100,000 prompt tokens less than elastic" in sentence


def test_the_split_is_held_against_the_best_where_elastic_was_not_asked_for() -> None:
    runs = [run("static"), run("lcm", hits=0.31), run("periodic", hits=0.35), run("infinite")]
    assert "50,000 prompt tokens more than periodic" in cost(runs)
    assert "than" not in cost([run("static"), run("infinite", hits=0.9)])


def test_without_a_fixed_split_the_first_policy_is_told_of() -> None:
    sentence = cost([run("elastic", stranded_share=0.5), run("lcm")])
    assert sentence.startswith(
        "Policy elastic leaves 30.000 GB (50.0 %) stranded on average, finds"
    )


@pytest.mark.parametrize(
    ("values", "marked"),
    [
        ([0.1, 0.3, 0.2], {1}),
        ([0.3, 0.3, 0.2], {0, 1}),
        ([0.30001, 0.3, 0.2], {0, 1}),
        ([0.3, 0.3, 0.3], set[int]()),
        ([0.3], set[int]()),
    ],
)
def test_the_best_are_marked_as_they_read(values: list[float], marked: set[int]) -> None:
    runs = [run(f"policy{number}", hits=value) for number, value in enumerate(values)]
    (hits,) = [metric for metric in metrics_of(runs) if metric.name == "hit rate"]
    assert best(hits, runs) == marked


def test_less_is_better_where_it_is_and_what_is_unknown_is_not_best() -> None:
    runs = [run("a", slow=2.0), silent("b"), run("c"), run("oracle-static", slow=0.1)]
    (first,) = [metric for metric in metrics_of(runs) if metric.name == "TTFT p99"]
    assert best(first, runs) == {2}


def test_the_best_split_in_hindsight_can_be_given_back() -> None:
    found = run("oracle-static")
    runs = (run("static"), replace(found, settings={"pool_ratio": {"full": 0.7, "indexer": 0.3}}))
    *_, sentence, split = report(comparison(*runs))
    assert sentence.startswith("The fixed split")
    assert split == "Best fixed split in hindsight: --pool-ratio full=0.7000,indexer=0.3000"
    assert split in draw_page(comparison(*runs))


def test_a_run_without_samples_has_no_split() -> None:
    made = run("static")
    empty = replace(made.timeline, mapped=np.zeros((2, 0), np.int64))
    assert split_of(replace(made, timeline=empty)) == ""
    assert cost([replace(made, timeline=empty)]).startswith("The fixed split leaves")
