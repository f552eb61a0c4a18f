"""Scores by the published formula; noise and a falling curve are no spikes, a jump is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megabert.training.spike_policy import Spikes


def test_the_score_is_the_modified_z_score():
    spikes = Spikes(8, 3.5, [1.0, 2.0, 3.0, 4.0, 100.0])
    # median 3, absolute deviations 2 1 0 1 97: MAD 1
    assert spikes.score(7.0) == pytest.approx(0.6745 * 4)
    assert spikes.score(1.0) == pytest.approx(-0.6745 * 2)
    assert not spikes.is_spike(8.0) and spikes.is_spike(8.5)  # 3.37 and 3.71


def test_nothing_is_judged_before_a_quarter_of_the_window_or_when_not_finite():
    spikes = Spikes(16, 3.0)
    for known in range(4):
        assert spikes.score(1e9) == 0.0, known
        spikes.add(5.0 + known / 10)
    assert spikes.score(1e9) > 1e3
    spikes.add(math.nan)
    spikes.add(math.inf)
    assert len(spikes.state()) == 4 and spikes.score(math.nan) == 0.0


def test_equal_losses_make_no_spike_of_nothing():
    spikes = Spikes(16, 10.0, [2.0] * 16)
    assert spikes.score(2.002) == pytest.approx(0.6745)
    assert not spikes.is_spike(2.02) and spikes.is_spike(2.04)


def test_a_noisy_falling_curve_has_no_spikes_and_a_jump_is_one():
    draw = np.random.default_rng(3)
    curve = 2.0 + 8.0 * np.exp(-np.arange(4000) / 800) + draw.normal(0, 0.05, 4000)
    spikes, found = Spikes(128, 10.0), []
    for step, loss in enumerate(curve):
        value = float(loss) + (3.0 if step in (900, 2500, 2501) else 0.0)
        if spikes.is_spike(value):
            found.append(step)
        spikes.add(value)
    assert found == [900, 2500, 2501]


def test_state_is_all_it_takes_to_go_on():
    draw = np.random.default_rng(4).normal(3, 0.1, 60)
    whole, first = Spikes(16, 5.0), Spikes(16, 5.0)
    for loss in draw[:30]:
        whole.add(float(loss))
        first.add(float(loss))
    second = Spikes(16, 5.0, first.state())
    for loss in draw[30:]:
        assert second.score(float(loss)) == whole.score(float(loss))
        whole.add(float(loss))
        second.add(float(loss))
