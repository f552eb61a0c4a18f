"""What an update predicts, by the share of the budget used: values worked out by hand."""

from __future__ import annotations

from math import nextafter

import pytest

from megabert import config as configuration
from megabert.config import Config
from megabert.data.masking import Masking, held_out_masking, largest_capacity, masking_at


def config(*overrides: str) -> Config:
    return configuration.load("", ["model.nsp=false", *overrides])


def test_by_default_masking_is_constant() -> None:
    cfg = configuration.load("", ["data.masking.strategy=word", "data.masking.rate=0.2"])
    assert {masking_at(cfg, share, 128) for share in (0.0, 0.4, 1.0)} == {Masking("word", 0.2)}
    assert held_out_masking(cfg) == Masking("word", 0.2) and largest_capacity(cfg, 128) == 27
    whole = config("data.masking.strategy=causal")
    assert masking_at(whole, 0.0, 128) == held_out_masking(whole) == Masking("causal")
    assert largest_capacity(whole, 128) == 128


def test_the_first_share_of_the_budget_is_causal() -> None:
    cfg = config("objective.causal_share=0.4")
    for share in (0.0, 0.2, nextafter(0.4, 0)):
        assert masking_at(cfg, share, 128) == Masking("causal")
        assert masking_at(cfg, share, 128).objective == "causal"
    for share in (0.4, 1.0):
        assert masking_at(cfg, share, 128) == Masking("token")
        assert masking_at(cfg, share, 128).objective == "masked"
    assert held_out_masking(cfg) == Masking("token") and largest_capacity(cfg, 128) == 128


def test_the_rate_falls_in_equal_steps() -> None:
    cfg = config("data.masking.rate=0.3", "data.masking.final_rate=0.15")
    found = [masking_at(cfg, i / 1600, 128) for i in range(1601)]
    rates = [masking.rate for masking in found]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) == 16
    assert {rates.count(rate) for rate in set(rates)} == {100, 101}  # the last share, 1, has the last rate too
    assert sorted(set(rates)) == pytest.approx([0.01 * n for n in range(15, 31)])
    assert rates[0] == 0.3 and rates[-1] == pytest.approx(0.15)
    assert {masking.capacity(128) for masking in found} == {40}  # ceil(0.3 x 128) + 1, of every update
    assert held_out_masking(cfg).rate == 0.15 and held_out_masking(cfg).capacity(128) == 21


def test_the_rate_falls_after_the_causal_share() -> None:
    cfg = config("data.masking.rate=0.3", "data.masking.final_rate=0.28", "objective.causal_share=0.4")
    shares = (0.39, 0.4, 0.59, 0.61, 0.79, 0.81, 1.0)
    kinds = [masking_at(cfg, share, 128) for share in shares]
    assert kinds[0].causal and not any(masking.causal for masking in kinds[1:])
    assert [m.rate for m in kinds[1:]] == pytest.approx([0.3, 0.3, 0.29, 0.29, 0.28, 0.28])


def test_a_rate_may_rise_and_slots_may_be_given() -> None:
    cfg = config("data.masking.rate=0.1", "data.masking.final_rate=0.2")
    assert [masking_at(cfg, s, 100).rate for s in (0.0, 1.0)] == pytest.approx([0.1, 0.2])
    assert {masking_at(cfg, s, 100).capacity(100) for s in (0.0, 1.0)} == {21}
    cfg = config("data.masking.rate=0.3", "data.masking.final_rate=0.2", "data.masking.max_predictions=9")
    assert masking_at(cfg, 0.5, 128).capacity(128) == largest_capacity(cfg, 128) == 9


def test_held_out_rows_have_their_own_rate() -> None:
    cfg = config("data.masking.rate=0.3", "data.masking.final_rate=0.2", "eval.rate=0.15")
    assert held_out_masking(cfg) == Masking("token", 0.15)
