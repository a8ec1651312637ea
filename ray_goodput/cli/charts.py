"""Curves as values in the units of an SVG drawing: a template draws them. Pure; no page, no library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 360.0, 230.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 334.0, 18.0, 188.0
"""The drawing's size and the frame of its axes: as wide as a phone, so that its text is readable there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve: a path, its style's name and its label with a place."""

    style: str
    path: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point with a text at (text_x, text_y); `anchor` keeps it inside the frame. low, high: ends of an error bar."""

    x: float
    y: float
    text: str
    text_x: float
    text_y: float
    anchor: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Everything that is drawn; ticks are (place, text)."""

    title: str
    x_label: str
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """Data to drawing, linear or logarithmic; values outside are brought to the edge."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)


def path(points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> str:
    """An SVG path through the points; it has a gap where y leaves the frame, rather than a false edge."""
    parts: list[str] = []
    pen_up = True
    for px, py in points:
        if not y.low <= py <= y.high:
            pen_up = True
            continue
        parts.append(f"{'M' if pen_up else 'L'}{x(px)} {y(py)}")
        pen_up = False
    return " ".join(parts)


def mark(px: float, py: float, text: str, x: Scale, y: Scale, *, down: float = 18.0, anchor: str = "") -> Mark:
    """A point with its text `down` from it; by default to its left in the right half, else to its right."""
    at, level = x(px), y(py)
    anchor = anchor or ("end" if at > (LEFT + RIGHT) / 2.0 else "start")
    return Mark(
        x=at,
        y=level,
        text=text,
        text_x=at + {"end": -8.0, "start": 8.0, "middle": 0.0}[anchor],
        text_y=min(max(level + down, TOP - 6.0), BOTTOM - 5.0),
        anchor=anchor,
    )


def error_bar(px: float, value: float, low: float, high: float, x: Scale, y: Scale) -> Mark:
    """A vertical bar from low to high, without a text."""
    return Mark(x=x(px), y=y(value), text="", text_x=0.0, text_y=0.0, anchor="start", low=y(low), high=y(high))


def steps_of(low: float, high: float, most: int = 6) -> list[float]:
    """Round values from `low` to `high`, at most `most` of them: for ticks of a linear scale."""
    if not high > low:
        return [low]
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(size * m for m in (1, 2, 2.5, 5, 10, 20) if (high - low) / (size * m) <= most - 1)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def percent_ticks(y: Scale) -> tuple[tuple[float, str], ...]:
    """Ticks of a scale of shares, with as many digits as tell them apart."""
    values = steps_of(y.low, y.high)
    gap = values[1] - values[0] if len(values) > 1 else 0.1
    digits = max(0, math.ceil(-math.log10(gap * 100.0) - 1e-9))
    if abs(gap * 100.0 * 10**digits - round(gap * 100.0 * 10**digits)) > 1e-6:
        digits += 1
    return tuple((y(v), f"{v:.{digits}%}") for v in values)


def log_ticks(
    x: Scale, candidates: Sequence[float], text: Callable[[float], str], most: int = 6
) -> tuple[tuple[float, str], ...]:
    """Those of `candidates` that lie in the scale, thinned out to at most `most`."""
    inside = [c for c in candidates if x.low * 0.999 <= c <= x.high * 1.001]
    every = max(1, math.ceil(len(inside) / most))
    return tuple((x(c), text(c)) for c in inside[::every])


def log_space(low: float, high: float, num: int = 121) -> list[float]:
    """`num` values from low to high, each the same factor above the one before."""
    return [low * (high / low) ** (i / (num - 1)) for i in range(num)]
