"""The texts have the tokens they are said to have, a side's ratio is of the same round, and the best batch is the fastest."""

from __future__ import annotations

import time

import pytest

from benchmarks import bench_predict as bench


def test_texts_have_so_many_tokens() -> None:
    words, pieces = ["a", "long", "c", "longest"], [1, 3, 1, 9]
    texts = bench.texts_of_tokens(words, pieces, [5, 4, 16])
    assert texts == ["a c a", "c a", "long c longest a"]
    by_word = dict(zip(words, pieces, strict=True))
    assert [2 + sum(by_word[w] for w in text.split()) for text in texts] == [5, 4, 16]


def test_lengths_of_the_kinds() -> None:
    assert bench.lengths_of("short", 100) == [16] * 6 and bench.lengths_of("long", 1100) == [512] * 2
    mixed = bench.lengths_of("mixed", 20_000)
    assert mixed == bench.lengths_of("mixed", 20_000) and min(mixed) >= 8 and max(mixed) == 512
    assert 20_000 <= sum(mixed) < 20_512 and sorted(mixed)[len(mixed) // 2] == pytest.approx(55, abs=15)


def test_every_side_at_its_best_against_the_same_round_of_the_peer() -> None:
    def side(cost: dict[int, float]) -> bench.Side:
        return bench.Side(lambda texts, batch: time.sleep(cost[batch]) or batch, tuple(cost))

    sides = {"peer": side({1: 0.03, 8: 0.02}), "ours": side({512: 0.005, 4096: 0.04})}
    figures, results = bench.compare(sides, ["text"] * 10, 3)
    assert results == {"peer": 8, "ours": 512}
    assert figures["peer"]["batch"] == 8 and figures["peer"]["ratio"] == 1
    assert 2 < figures["ours"]["ratio"] < 6 and len(figures["ours"]["seconds"]) == 3
    assert bench.ratio({"peer": [4.0, 9.0, 8.0], "ours": [2.0, 1.0, 4.0]}, "peer", "ours") == 2
