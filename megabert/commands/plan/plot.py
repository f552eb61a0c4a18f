"""Plot of a forecast as SVG: seconds an update, and efficiency, against the number of GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from megabert.commands.plan.forecast import Point, efficiency

WIDTH, HEIGHT, PANEL = 760, 300, 300  # pixels; a panel is what lies between its axes
LEFT, TOP, DEPTH = 60, 40, 200
BLUE, GREY = "#1b6ca8", "#999999"


def svg(points: Sequence[Point], title: str) -> str:
    """Two panels: seconds an update (both axes logarithmic; grey: as if no GPU were ever waiting), and efficiency."""
    sizes = [point.size for point in points]
    seconds = [point.step.seconds for point in points]
    ideal = [seconds[0] * sizes[0] / size for size in sizes]
    shares = efficiency(points)
    low, high = math.log10(min(*ideal, *seconds)), math.log10(max(seconds))
    high = max(high, low + 0.3)
    most = max(1.0, *shares)
    first = [_up((math.log10(value) - low) / (high - low)) for value in seconds]
    grey = [_up((math.log10(value) - low) / (high - low)) for value in ideal]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{WIDTH / 2:g}" y="16" text-anchor="middle">{escape(title)}</text>',
        *_panel(LEFT, "seconds an update", sizes),
        _line(LEFT, sizes, grey, GREY),
        _line(LEFT, sizes, first, BLUE),
        *_values(LEFT, sizes, first, [f"{value:.3g}" for value in seconds]),
        *_panel(LEFT + PANEL + 60, "efficiency", sizes),
        _line(LEFT + PANEL + 60, sizes, [_up(share / most) for share in shares], BLUE),
        *_values(LEFT + PANEL + 60, sizes, [_up(s / most) for s in shares], [f"{share:.0%}" for share in shares]),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _up(share: float) -> float:
    return TOP + DEPTH * (1 - share)


def _along(left: float, sizes: Sequence[int]) -> list[float]:
    """Where each size stands on a logarithmic axis."""
    low, high = math.log(min(sizes)), math.log(max(sizes))
    return [left + (PANEL - 20) * (math.log(size) - low) / (high - low or 1.0) for size in sizes]


def _panel(left: float, name: str, sizes: Sequence[int]) -> list[str]:
    bottom = TOP + DEPTH
    ticks = [
        f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{size:,}</text>'
        for x, size in zip(_along(left, sizes), sizes, strict=True)
    ]
    axes = f'<path d="M{left} {TOP} V{bottom} H{left + PANEL}" fill="none" stroke="#333"/>'
    return [
        axes,
        f'<text x="{left}" y="{TOP - 8}">{name}</text>',
        f'<text x="{left + PANEL / 2:g}" y="{bottom + 34}" text-anchor="middle">GPUs</text>',
        *ticks,
    ]


def _line(left: float, sizes: Sequence[int], heights: Sequence[float], colour: str) -> str:
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(_along(left, sizes), heights, strict=True))
    return f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _values(left: float, sizes: Sequence[int], heights: Sequence[float], texts: Sequence[str]) -> list[str]:
    places = zip(_along(left, sizes), heights, texts, strict=True)
    return [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{BLUE}"/><text x="{x + 5:.1f}" y="{y - 6:.1f}">{text}</text>'
        for x, y, text in places
    ]
