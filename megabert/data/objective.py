"""Objective of an update: left to right or masked LM, and at which rate, as a function of the share of the budget used.

A run may read left to right first (`objective.causal_share`) and lower its masking rate over what comes then
(`data.masking.final_rate`). All updates of one kind have as many prediction slots: those of the largest rate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megabert.data.masking import Masking

if TYPE_CHECKING:
    from megabert.config import Config

RATE_STEP = 0.01  # of a masking rate that changes: so seldom that workers, which work ahead, seldom work in vain


def masking_at(config: Config, share: float, seq_len: int) -> Masking:
    """How an update is masked before which `share` of the budget is used (0 to 1), in rows of `seq_len` positions.

    The rate goes from `rate` to `final_rate` in equal steps of about RATE_STEP, both of which hold as long as any other.
    """
    options, causal_share = config.data.masking, config.objective.causal_share
    masking = Masking.of(options)
    if share < causal_share:
        return replace(masking, strategy="causal")
    if not options.final_rate or masking.causal:
        return masking
    change = options.final_rate - options.rate
    steps = max(1, round(abs(change) / RATE_STEP))
    progress = (share - causal_share) / (1 - causal_share)
    rate = options.rate + change * min(steps, int(progress * (steps + 1))) / steps
    return replace(masking, rate=rate, max_predictions=masked_capacity(config, seq_len))


def masked_capacity(config: Config, seq_len: int) -> int:
    """Prediction slots a row of the updates that are not left to right (of all, where all are)."""
    options = config.data.masking
    return replace(Masking.of(options), rate=max(options.rate, options.final_rate)).capacity(seq_len)


def largest_capacity(config: Config, seq_len: int) -> int:
    """Prediction slots a row of the updates that have most."""
    return seq_len if config.causal_updates else masked_capacity(config, seq_len)


def evaluated(config: Config) -> Masking:
    """How held-out rows are masked: never left to right, unless the whole run is."""
    options = config.data.masking
    return replace(Masking.of(options), rate=config.eval.rate or options.final_rate or options.rate)
