"""Learning-rate schedules: a pure function of the update's number and, for `budget`, of the training time used so far."""

from __future__ import annotations

import math

from megabert.config import ScheduleConfig


def learning_rate(schedule: ScheduleConfig, peak: float, step: int, minutes: float = 0.0) -> float:
    """Learning rate of update `step` (0 for the first).

    Warm-up is linear and reaches `peak` at update `warmup_steps` (never 0, so no update is wasted); decay runs from
    there to `total_steps`. `budget` replaces updates by minutes of training (Izsak et al. 2021, section 3.2).

    Raises ValueError for a negative step or time.
    """
    if step < 0 or minutes < 0:
        raise ValueError(f"step={step} and minutes={minutes} must not be negative")
    if schedule.name == "budget":
        used = minutes / schedule.budget_minutes
        if used < schedule.budget_warmup:
            return peak * max(used / schedule.budget_warmup, 1e-3)
        return peak * _decay(
            "linear", (used - schedule.budget_warmup) / (1 - schedule.budget_warmup), schedule
        )
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    span = max(schedule.total_steps - schedule.warmup_steps, 1)
    return peak * _decay(schedule.name, (step - schedule.warmup_steps) / span, schedule)


def finished(schedule: ScheduleConfig, step: int, minutes: float) -> bool:
    """True when no update is left: all steps are done, or the time budget is used up."""
    spent = schedule.name == "budget" and minutes >= schedule.budget_minutes
    return step >= schedule.total_steps or spent


def _decay(name: str, progress: float, schedule: ScheduleConfig) -> float:
    left = 1.0 - min(max(progress, 0.0), 1.0)
    if name == "constant":
        return 1.0
    if name == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * (1.0 - left)))
    elif name == "polynomial":
        left = left**schedule.power
    return schedule.final_ratio + (1.0 - schedule.final_ratio) * left
