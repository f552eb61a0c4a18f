"""Durations as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """`93784` → `1d02h03m`."""
    minutes, sec = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h{minutes:02d}m"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{sec:02d}s"
