"""Learning-rate schedules: pure functions of the update's number, or of the tokens or minutes used so far."""

from __future__ import annotations

import math

from megabert.config import Phase, ScheduleConfig


def share_used(schedule: ScheduleConfig, step: int, minutes: float = 0.0, tokens: int = 0) -> float:
    """Share (0 to 1) of the run's budget used before update `step` (0 for the first).

    `minutes` of training and real `tokens` are those of all updates before it; `schedule.by` selects which counts.
    """
    if schedule.unit == "minutes":
        return min(minutes / schedule.budget_minutes, 1.0)
    if schedule.unit == "tokens":
        return min(tokens / schedule.budget_tokens, 1.0)
    return min(step / schedule.total_steps, 1.0)


def learning_rate(schedule: ScheduleConfig, peak: float, step: int, minutes: float = 0.0, tokens: int = 0) -> float:
    """Learning rate of update `step` (0 for the first), before which `minutes` and `tokens` were used.

    Warm-up is linear and reaches `peak` at update `warmup_steps` (the rate is never 0); decay runs from there to
    `total_steps`. By minutes of training (Izsak et al. 2021, section 3.2) or tokens, warm-up is a share of these.
    """
    assert step >= 0 and minutes >= 0 and tokens >= 0
    if schedule.unit != "steps":
        return peak * _by_share(schedule, share_used(schedule, step, minutes, tokens))
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    span = max(schedule.total_steps - schedule.warmup_steps, 1)
    return peak * _decay(schedule, (step - schedule.warmup_steps) / span, schedule.warmup_share)


def phase_rate(phase: Phase, schedule: ScheduleConfig, step: int, minutes: float = 0.0, tokens: int = 0) -> float:
    """Learning rate of an update of a phase, arguments as of `learning_rate`: the run's `schedule` with the phase's peak, or the
    phase's own schedule over its share of the budget."""
    peak = phase.config.optimizer.lr
    if not phase.own_schedule:
        return learning_rate(schedule, peak, step, minutes, tokens)
    used, size = share_used(schedule, step, minutes, tokens) - phase.begin, phase.end - phase.begin
    update = 1 / schedule.total_steps if schedule.unit == "steps" else 0.0
    return peak * _by_share(phase.config.schedule, used / size, update / size)


def limit_reached(schedule: ScheduleConfig, step: int, minutes: float, tokens: int = 0) -> str:
    """The setting that ends the run before update `step`, with its value: all steps are done, or the budget of minutes or tokens is
    used up; "" before that."""
    if step >= schedule.total_steps:
        return f"schedule.total_steps={schedule.total_steps}"
    if share_used(schedule, step, minutes, tokens) < 1:
        return ""
    budget = schedule.budget_minutes if schedule.unit == "minutes" else schedule.budget_tokens
    return f"schedule.budget_{schedule.unit}={budget}"


def _by_share(schedule: ScheduleConfig, used: float, update: float = 0.0) -> float:
    """Learning rate relative to its peak when a share of the budget (0 to 1) is used; `update`: that of an update, 0 if it is unknown."""
    warmup = schedule.budget_warmup
    if used < warmup:
        return min(max((used + update) / warmup, 1e-3), 1.0)
    return _decay(schedule, (used - warmup) / (1 - warmup), warmup)


def _decay(schedule: ScheduleConfig, progress: float, warmup: float) -> float:
    """Learning rate relative to its peak after `progress` (0 to 1) of the part after a `warmup` of that share."""
    left = 1.0 - min(max(progress, 0.0), 1.0)
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * (1.0 - left)))
    elif schedule.name == "sqrt":
        left = 1.0 - math.sqrt(1.0 - left)
    elif schedule.name == "polynomial":
        left = left**schedule.power
    elif schedule.name == "wsd":
        left = min(left * (1.0 - warmup) / schedule.decay_share, 1.0)
    return schedule.final_ratio + (1.0 - schedule.final_ratio) * left
