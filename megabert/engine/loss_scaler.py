"""fp16's loss scale, which DeepSpeed's optimizers keep in objects of two kinds."""

from __future__ import annotations

from typing import Any

STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # stage 0 has no hysteresis


def of(wrapper: Any) -> Any:
    """What holds the loss scale of DeepSpeed's optimizer: of one kind at stage 0, of another above; None in fp32 at 0."""
    return getattr(wrapper, "loss_scaler", None) or getattr(wrapper, "loss_scale_config", None)


def scale_and_floor(wrapper: Any) -> tuple[float, float]:
    """The current loss scale of DeepSpeed's optimizer, and its floor."""
    settings = of(wrapper)
    floor = getattr(settings, "min_scale", None) or getattr(settings, "min_loss_scale", None)
    return float(getattr(settings, "cur_scale", 1.0)), float(floor or 1.0)
