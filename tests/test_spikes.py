"""Scores by the published formula; noise and a falling curve are not spikes, a jump is."""

import math

import numpy as np
import pytest

from megabert.config import SpikesConfig
from megabert.spikes import SpikePolicy, Spikes


def test_the_score_is_the_modified_z_score():
    spikes = Spikes(8, [1.0, 2.0, 3.0, 4.0, 100.0])
    # median 3, absolute deviations 2 1 0 1 97: MAD 1
    assert spikes.score(7.0) == pytest.approx(0.6745 * 4)
    assert spikes.score(1.0) == pytest.approx(-0.6745 * 2)
    assert Spikes(16, [2.0] * 16).score(2.002) == pytest.approx(0.6745), "of equal losses"


def test_nothing_is_judged_before_a_quarter_window():
    spikes = Spikes(16)
    for known in range(4):
        assert spikes.score(1e9) == 0.0, known
        spikes.add(5.0 + known / 10)
    assert spikes.score(1e9) > 1e3
    spikes.add(math.nan)
    spikes.add(math.inf)
    assert len(spikes.state()) == 4 and spikes.score(math.nan) == 0.0


def test_a_jump_in_noise_is_a_spike():
    draw = np.random.default_rng(3)
    curve = 2.0 + 8.0 * np.exp(-np.arange(4000) / 800) + draw.normal(0, 0.05, 4000)
    jumps = [900, 2500, 2501]
    curve[jumps] += 3.0
    spikes, found = Spikes(128), []
    for step, loss in enumerate(curve.tolist()):
        found += [step] * (spikes.score(loss) > 10.0)
        spikes.add(loss)
    assert found == jumps


def test_state_is_all_it_takes_to_go_on():
    draw = np.random.default_rng(4).normal(3, 0.1, 60).tolist()
    whole = Spikes(16)
    for loss in draw[:30]:
        whole.add(loss)
    second = Spikes(16, whole.state())
    for loss in draw[30:]:
        assert second.score(loss) == whole.score(loss)
        whole.add(loss)
        second.add(loss)


def policy(name="warn", **settings):
    made = SpikePolicy(SpikesConfig(policy=name, window=8, threshold=5.0, **settings), max_bad_steps=3)
    made.resume({"masked": [2.0, 2.1, 1.9, 2.0, 2.05, 1.95, 2.0, 2.0]}, bad=0)
    return made


def judged(of, loss, skipped=False, vetoed=False, objective="masked"):
    return of.judge(loss, objective, skipped=skipped, vetoed=vetoed)


@pytest.mark.parametrize("name", ["off", "warn", "skip", "rollback"])
def test_a_spike_leads_to_what_the_policy_says(name):
    of, skipped = policy(name), name == "skip"
    found = judged(of, 9.0, skipped=skipped, vetoed=skipped)
    assert (found.rollback, found.reason) == (name == "rollback", "")
    assert [(trouble.kind, trouble.action) for trouble in found.troubles] == [("spike", name)] * (name != "off")
    veto = of.veto("masked")
    assert (veto is not None) == skipped
    if veto is not None:
        assert veto(50.0) and not veto(2.0)


def test_losses_compare_within_their_objective():
    """Causal updates at twice the loss of the masked ones are not spikes; one that stands out among them is, also after a resume."""
    of = policy("skip")
    for loss in (4.0, 4.1, 3.9, 4.0):
        assert not judged(of, loss, objective="causal").troubles
    again = policy("skip")
    again.resume(of.state(), bad=0)
    for one in (of, again):
        masked, causal = one.veto("masked"), one.veto("causal")
        assert masked is not None and causal is not None
        assert masked(4.0) and not causal(4.0) and causal(9.0)


def test_updates_never_applied_end_the_run():
    of = policy()
    assert not judged(of, math.nan, skipped=True).reason and of.bad == 1
    assert not judged(of, 2.0).troubles and of.bad == 0
    assert [bool(judged(of, math.nan, skipped=True).reason) for _ in range(3)] == [False, False, True]
    of.resume({}, bad=2)
    last = judged(of, math.inf, skipped=True)
    assert "3 updates in a row were not applied" in last.reason
    assert [trouble.kind for trouble in last.troubles] == ["non-finite"]


def test_rollbacks_are_bounded():
    of = policy("rollback", max_rollbacks=1)
    assert judged(of, 9.0).rollback
    of.resume({"masked": [2.0, 2.1, 1.9, 2.0]}, bad=0)  # as after the rollback: what is counted is the process' own
    last = judged(of, 9.0)
    assert "a spike after 1 rollbacks" in last.reason


def test_without_a_policy_the_loss_is_never_read():
    class Unread:
        def __float__(self) -> float:
            raise AssertionError("reading it waits for the device")

    assert not policy("off").judge(Unread(), "masked", skipped=False, vetoed=False).troubles
