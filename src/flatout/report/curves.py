"""Charts as inline SVG, made of nothing but text: lines over steps, a bar of shares, axes for other charts."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 460, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 14, 34
COLOURS = ("#1f6f8b", "#c8553d", "#6a994e", "#7b5ea7", "#b08900", "#5c677d", "#2a9d8f", "#d08c60", "#9d4e6b", "#8fa35a")


@dataclass(frozen=True, slots=True)
class Curve:
    """One named line of points (step, value)."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One direction of a chart: where a value lies between its ends, 0 and 1, and which text stands where."""

    place: Callable[[Any], float | None]
    ticks: Sequence[tuple[float, str]]
    is_words: bool = False


def line_chart(title: str, curves: Sequence[Curve], *, x_label: str = "step", doublings: bool = False) -> str:
    """An SVG of some curves; empty when there is not one point. `doublings`: equal steps to the right are factors."""
    if doublings:
        curves = [Curve(each.name, [(math.log2(x), y) for x, y in each.points if x > 0]) for each in curves]
    points = [point for curve in curves for point in curve.points if math.isfinite(point[1])]
    if not points:
        return ""
    across = [x for x, _ in points]
    x_ticks, y_ticks = _whole_ticks(across) if doublings else _ticks(across), _ticks([y for _, y in points])
    x_range, y_range = (x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        right = (x - x_range[0]) / (x_range[1] - x_range[0])
        up = (y - y_range[0]) / (y_range[1] - y_range[0])
        return _LEFT + right * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    for tick in y_ticks:
        _, y = place(x_range[0], tick)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="tick end">{tick:g}</text>')
    for tick in x_ticks:
        x, _ = place(tick, y_range[0])
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" class="tick middle">{_x_text(tick, doublings)}</text>'
        )
    parts.append(f'<text x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}" class="tick end">{html.escape(x_label)}</text>')
    for curve, colour in zip(curves, COLOURS, strict=False):
        dots = [place(x, y) for x, y in curve.points if math.isfinite(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        if len(dots) <= 30:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}"/>' for x, y in dots]
    legend = " ".join(
        f'<span style="color:{colour}">&#9644;</span> {html.escape(curve.name)}'
        for curve, colour in zip(curves, COLOURS, strict=False)
    )
    return (
        f"<figure><figcaption>{html.escape(title)} <small>{legend}</small></figcaption>{''.join(parts)}</svg></figure>"
    )


def stacked_bar(parts: dict[str, float], unit: str) -> str:
    """One bar whose pieces show shares, with a legend that names each."""
    total = sum(parts.values())
    if total <= 0:
        return ""
    bar, legend, x = [], [], 0.0
    for (name, value), colour in zip(parts.items(), COLOURS, strict=False):
        width = 900 * value / total
        bar.append(f'<rect x="{x:.2f}" y="0" width="{width:.2f}" height="26" fill="{colour}"/>')
        x += width
        text = f"{html.escape(name)} {value:.2f} {html.escape(unit)} ({value / total:.0%})"
        legend.append(f'<span><b style="color:{colour}">&#9644;</b> {text}</span>')
    picture = f'<svg viewBox="0 0 900 26" class="bar" preserveAspectRatio="none">{"".join(bar)}</svg>'
    return f'{picture}<p class="legend">{" ".join(legend)}</p>'


def number_axis(values: Sequence[float], *, log: bool = False) -> Axis:
    """An axis that ends at round numbers; `log`, for numbers above 0: equal steps are factors."""
    numbers, scale = (_log_ticks(values), math.log10) if log else (_plain_ticks(values), float)
    low, high = scale(numbers[0]), scale(numbers[-1])

    def place(value: float) -> float:
        return (scale(value) - low) / (high - low)

    return Axis(place=place, ticks=[(place(number), f"{number:g}") for number in numbers])


def word_axis(words: Sequence[str]) -> Axis:
    """An axis with evenly spaced words, in their order; a word that is not among them has no place."""
    places = {word: (i + 0.5) / len(words) for i, word in enumerate(words)}
    return Axis(place=places.get, ticks=[(place, word) for word, place in places.items()], is_words=True)


def _plain_ticks(values: Sequence[float]) -> list[float]:
    """Whole numbers where a few of them hold all values, and all values are counts; else round ones."""
    are_counts = all(float(value).is_integer() and abs(value) < 1e9 for value in values)
    return _whole_ticks(values) if are_counts and max(values) - min(values) <= 7 else _ticks(values)


def _log_ticks(values: Sequence[float]) -> list[float]:
    """Powers of ten that hold all values between them, or 1, 2 and 5 times these where the range is short."""
    exponents = [math.log10(value) for value in values]
    powers = range(math.floor(min(exponents)), math.ceil(max(exponents)) + 1)
    fine = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    low = max(tick for tick in fine if tick <= min(values) * (1 + 1e-9))
    high = min(tick for tick in fine if tick >= max(values) * (1 - 1e-9))
    inside = [tick for tick in fine if low <= tick <= high]
    return inside if 2 <= len(inside) <= 6 else [10.0**power for power in _whole_ticks(exponents)]


def _whole_ticks(values: Sequence[float]) -> list[float]:
    """At most eight whole numbers in equal steps that hold all values between them."""
    low, high = math.floor(min(values)), math.ceil(max(values))
    step = max(1, -(-(high - low) // 7))
    return [float(low + i * step) for i in range(-(-max(high - low, 1) // step) + 1)]


def _x_text(tick: float, doublings: bool) -> str:
    return f"{2**tick:,.0f}" if doublings else f"{tick:g}"


def _ticks(values: Sequence[float]) -> list[float]:
    """Four to seven round numbers that hold all values between them."""
    low, high = min(values), max(values)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1):
        margin = max(0.5, abs(low) * 1e-9)
        low, high = low - margin, high + margin
    raw = (high - low) / 5
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw)
    first = math.floor(low / step)
    return [float(f"{i * step:.12g}") for i in range(first, math.ceil(high / step) + 1)]
