"""Line charts as inline SVG: nothing is fetched, and colours come from the page's style, so that both themes fit."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megabert.commands.report.series import thinned

WIDTH, HEIGHT = (
    380,
    232,
)  # of a chart: its text has its own size on a phone, and three stand side by side on a desktop
LEFT, RIGHT, TOP, BOTTOM = 50, 20, 14, 34  # margins
LOGARITHMIC = 100.0  # a curve that may be logarithmic is, where its values differ by so much
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "bar")  # marks of the runs' held-out figures
APART = 12  # between the labels at the lines' ends


@dataclass(frozen=True)
class Line:
    """A curve of run number `run`, from 0. Held-out figures are dashed and marked."""

    run: int
    name: str
    x: np.ndarray
    y: np.ndarray
    held_out: bool = False


@dataclass(frozen=True)
class Mark:
    """A moment of the run that the chart points to."""

    x: float
    text: str
    kind: str  # restart, spike or objective


@dataclass(frozen=True)
class Chart:
    """A chart and how its numbers are written. `below`: what stands under the x axis."""

    title: str
    lines: list[Line]
    written: Callable[[float], str]
    below: str = "updates"
    may_be_logarithmic: bool = False
    from_zero: bool = False
    not_finite: int = 0
    marks: tuple[Mark, ...] = ()

    @property
    def logarithmic(self) -> bool:
        low = min(float(line.y.min()) for line in self.lines)
        high = max(float(line.y.max()) for line in self.lines)
        return self.may_be_logarithmic and low > 0 and high / low >= LOGARITHMIC


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def compact(value: float) -> str:
    """A number for an axis: 12000 is 12k, 0.00025 is 2.5e-4."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = 1e3 if unit == "k" else limit
            return f"{value / scale:.4g}{unit}"
    if 0 < size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


class _Scale:
    """From values to pixels."""

    def __init__(self, low: float, high: float, first: float, last: float, logarithmic: bool = False) -> None:
        self.logarithmic = logarithmic
        low, high = self._of(low), self._of(high)
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            pad = abs(low) * 0.05 or 1.0
            low, high = low - pad, high + pad
        self.low, self.high, self._first, self._last = low, high, first, last

    def _of(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value

    def __call__(self, value: float) -> float:
        share = (self._of(value) - self.low) / (self.high - self.low)
        return round(self._first + share * (self._last - self._first), 1)

    def ticks(self, count: int) -> list[float]:
        if not self.logarithmic:
            return ticks(self.low, self.high, count)
        every = max(1, math.ceil((self.high - self.low) / count))
        powers = [10.0**k for k in range(math.ceil(self.low), math.floor(self.high) + 1, every)]
        return powers if len(powers) > 1 else [10.0**v for v in ticks(self.low, self.high, count)]


def draw(chart: Chart, numbered: bool) -> str:
    """The SVG of a chart; `numbered`: each run's lines end in its number."""
    lines = [Line(line.run, line.name, *thinned(line.x, line.y), line.held_out) for line in chart.lines]
    across = _Scale(
        *(min(float(line.x.min()) for line in lines), max(float(line.x.max()) for line in lines)),
        *(LEFT, WIDTH - RIGHT),
    )
    low, high = min(float(line.y.min()) for line in lines), max(float(line.y.max()) for line in lines)
    low = min(low, 0.0) if chart.from_zero else low
    up = _Scale(low, high, HEIGHT - BOTTOM - 4 * (not chart.from_zero), TOP + 4, chart.logarithmic)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(described(chart))}">',
        *_axes(chart, across, up),
        *(_mark(mark, across) for mark in chart.marks),
        *(_curve(line, across, up) for line in lines),
        *(_ends(lines, across, up) if numbered else ()),
        "</svg>",
    ]
    return "".join(parts)


def described(chart: Chart) -> str:
    """What a chart shows, in words."""
    texts = [
        f"{line.name}: {chart.written(line.y[0])} at {compact(line.x[0])}, {chart.written(line.y[-1])} at {compact(line.x[-1])} "
        f"{chart.below}, between {chart.written(line.y.min())} and {chart.written(line.y.max())}"
        for line in chart.lines
    ]
    return f"{chart.title}. {'; '.join(texts)}."


def _axes(chart: Chart, across: _Scale, up: _Scale) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value in up.ticks(4):
        y = up(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{right}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:g}" class="end">{html.escape(_tick(chart, value))}</text>')
    for value in across.ticks(4):
        x = across(value)
        parts.append(f'<path class="axis" d="M{x} {bottom}v4"/>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" class="middle">{compact(value)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>')
    parts.append(f'<text x="{right}" y="{HEIGHT - 4}" class="end quiet">{html.escape(chart.below)}</text>')
    return parts


def _tick(chart: Chart, value: float) -> str:
    """A number at the y axis: as the chart's numbers are written where that is short, else compact."""
    text = chart.written(value)
    return text.replace(".0%", "%") if text.endswith("%") else compact(value)


def _curve(line: Line, across: _Scale, up: _Scale) -> str:
    points = [(across(float(x)), up(float(y))) for x, y in zip(line.x, line.y, strict=True)]
    kind = "held" if line.held_out else "line"
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    parts = [f'<path class="{kind} c{line.run}" d="{path}"/>']
    if line.held_out and len(points) <= 60:
        parts += [f'<path class="mark c{line.run}" d="{shape(line.run, x, y)}"/>' for x, y in points]
    elif len(points) == 1:
        parts.append(f'<path class="mark c{line.run}" d="{shape(0, *points[0])}"/>')
    return "".join(parts)


def shape(run: int, x: float, y: float) -> str:
    """The path of a run's mark."""
    return (
        f"M{x:g} {y:g}"
        + {
            "circle": "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0z",
            "square": "m-2.7 -2.7h5.4v5.4h-5.4z",
            "triangle": "m0 -3.6l3.4 6h-6.8z",
            "diamond": "m0 -3.8l3.8 3.8l-3.8 3.8l-3.8 -3.8z",
            "cross": "m-3 -1h2v-2h2v2h2v2h-2v2h-2v-2h-2z",
            "bar": "m-1.2 -4h2.4v8h-2.4z",
        }[SHAPES[run % len(SHAPES)]]
    )


def _ends(lines: Sequence[Line], across: _Scale, up: _Scale) -> list[str]:
    """The runs' numbers beside the last points of their lines, one a run, moved apart where they would meet."""
    found = {}
    for line in lines:  # the last line of a run, which is its held-out one where it has one
        found[line.run] = (up(float(line.y[-1])), across(float(line.x[-1])))
    parts = []
    ranked = sorted(found.items(), key=lambda item: item[1])
    room = (
        HEIGHT - BOTTOM - 6 - APART * (len(ranked) - 1)
    )  # the first may be no lower, so that the last is above the axis
    above = -math.inf
    for place, (run, (y, x)) in enumerate(ranked):
        at = min(max(y, above + APART), room + APART * place)
        above = at
        parts.append(f'<text x="{x + 6:g}" y="{at + 4:g}" class="run c{run}">{run + 1}</text>')
    return parts


def _mark(mark: Mark, across: _Scale) -> str:
    x = across(mark.x)
    bottom = HEIGHT - BOTTOM
    title = f"<title>{html.escape(mark.text)}</title>"
    if mark.kind == "spike":
        return f'<path class="spike" d="M{x} {bottom}l4 7h-8z">{title}</path>'
    sign = {"restart": "↻", "objective": "◆"}[mark.kind]
    return (
        f'<g class="event">{title}<path d="M{x} {TOP}V{bottom}"/>'
        f'<text x="{x}" y="{TOP - 3}" class="middle">{sign}</text></g>'
    )
