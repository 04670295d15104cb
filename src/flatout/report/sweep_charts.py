"""Charts of a sweep as inline SVG: what came of each trial, over time, over each parameter, and over all of them.

They take plain points, not trials. One colour stands for one thing in all of them: orange is the best trial, blue are
complete ones, grey and hollow are those that were stopped.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeGuard

from flatout.report.curves import COLOURS, HEIGHT, WIDTH, Axis, number_axis, word_axis

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 14, 34
_LETTER = 6.2
_FAR = 5
_MOST_POINTS = 100
_FEW = 8
_MANY = 100
_GREY = "#8b949e"
_MARKS = {
    "best": f'fill="{COLOURS[1]}" stroke="#fff"',
    "complete": f'fill="{COLOURS[0]}" fill-opacity=".75"',
    "pruned": f'fill="#fff" fill-opacity=".6" stroke="{_GREY}"',
}
_WORST, _GOOD = (0xC6, 0xDD, 0xE6), (0x0F, 0x3D, 0x4F)


@dataclass(frozen=True, slots=True)
class Dot:
    """What came of one trial; `kind` is best, complete or pruned."""

    number: int
    kind: str
    x: Any
    y: float


@dataclass(frozen=True, slots=True)
class Line:
    """What one trial reported while it ran, as (step, value)."""

    number: int
    kind: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plot:
    """An empty chart with its axes; a point beyond an end of an axis is drawn at that end."""

    x: Axis
    y: Axis
    width: int = WIDTH
    height: int = HEIGHT

    def at(self, x: Any, y: float) -> tuple[float, float]:
        across, up = (min(max(place or 0.0, 0.0), 1.0) for place in (self.x.place(x), self.y.place(y)))
        return self._right(across), self._down(up)

    def figure(self, title: str, legend: str, x_label: str, parts: Sequence[str]) -> str:
        label = f'<text x="{self.width - _RIGHT}" y="{self.height - 4}" class="tick end">{html.escape(x_label)}</text>'
        return (
            f"<figure><figcaption>{html.escape(title)} <small>{legend}</small></figcaption>"
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{html.escape(title)}">'
            f"{self._grid()}{self._x_texts()}{label}{''.join(parts)}</svg></figure>"
        )

    def _right(self, share: float) -> float:
        return _LEFT + share * (self.width - _LEFT - _RIGHT)

    def _down(self, share: float) -> float:
        return self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM)

    def _grid(self) -> str:
        parts = []
        for share, text in self.y.ticks:
            y = self._down(share)
            parts.append(f'<line x1="{_LEFT}" x2="{self.width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="tick end">{text}</text>')
        return "".join(parts)

    def _x_texts(self) -> str:
        """Texts below the chart: of numbers as many as fit, words in two rows where one is too short."""
        slot = (self.width - _LEFT - _RIGHT) / len(self.x.ticks)
        needed = _LETTER * (max(len(text) for _, text in self.x.ticks) + 1)
        rows = 2 if self.x.is_words and needed > slot else 1
        step = math.ceil(min(needed, 8 * _LETTER) / slot / rows) if self.x.is_words else math.ceil(needed / slot)
        parts = []
        for i, (share, text) in enumerate(self.x.ticks[::step]):
            y = self.height - _BOTTOM + 17 + 12 * (i % rows)
            x = self._right(share)
            room = min(slot * step * rows, 2 * (self.width - x), 2 * x)
            letters = int(room / _LETTER) - 1 if self.x.is_words else len(text)
            parts.append(_text(x, y, text, letters, "tick middle"))
        return "".join(parts)


def history_chart(dots: Sequence[Dot], *, metric: str, mode: str) -> str:
    """Values of complete trials in their order, with the best so far; `x` of a dot is the number of the trial."""
    if not dots:
        return ""
    values = [dot.y for dot in dots]
    axis = metric_axis(values, mode)
    plot = _Plot(x=number_axis([dot.number for dot in dots]), y=axis)
    corners: list[tuple[float, float]] = []
    for number, best in _best_so_far(dots, mode):
        x, y = plot.at(number, best)
        corners += [(x, corners[-1][1]), (x, y)] if corners else [(x, y)]
    line = _polyline(corners, f'stroke="{COLOURS[1]}" stroke-width="1.6"')
    legend = _legend({"complete": "a trial", "best": "the best so far"}) + far_worse(axis, values)
    return plot.figure(f"{metric} of each trial", legend, "trial", [line, *_circles(plot, dots)])


def learning_chart(lines: Sequence[Line], *, metric: str, mode: str) -> str:
    """What all trials reported over their steps; stopped ones end in a hollow dot."""
    lines = sorted(
        (line for line in lines if line.points), key=lambda line: ["pruned", "complete", "best"].index(line.kind)
    )
    if not lines:
        return ""
    points = [point for line in lines for point in line.points]
    axis = metric_axis([y for _, y in points], mode)
    plot = _Plot(x=number_axis([x for x, _ in points]), y=axis)
    parts = []
    for line in lines:
        shown = line.points[:: -(-len(line.points) // _MOST_POINTS)]
        places = [plot.at(*point) for point in [*shown, line.points[-1]]]
        parts.append(_polyline(places, _stroke(line.kind, len(lines)), f"trial {line.number}"))
    parts += _circles(plot, [Dot(line.number, line.kind, *line.points[-1]) for line in lines])
    names = {"best": "the best", "complete": "complete", "pruned": "not finished"}
    kinds = {line.kind for line in lines}
    legend = _legend({kind: name for kind, name in names.items() if kind in kinds})
    worst = [(min if mode == "max" else max)(y for _, y in line.points) for line in lines]
    return plot.figure(f"{metric} while training", legend + far_worse(axis, worst), "validation", parts)


def slice_chart(key: str, dots: Sequence[Dot], results: Axis, *, log: bool) -> str:
    """Results over one parameter; dots above a word are spread a little, so that each is seen."""
    if not dots:
        return ""
    axis = value_axis([dot.x for dot in dots], log=log)
    plot = _Plot(x=axis, y=results, width=300, height=190)
    spread = min(24.0, 120 / len(axis.ticks)) if axis.is_words else 0.0
    return plot.figure(shortened(key, 40), "", "", _circles(plot, dots, spread))


def importance_chart(shares: Mapping[str, float]) -> str:
    """A bar for each parameter: how much of the differences between trials it explains."""
    known = {key: share for key, share in shares.items() if is_number(share)}
    if not known:
        return ""
    parts = []
    letters = min(max(map(len, known)), 34)
    left = _LETTER * (letters + 2)
    for i, (key, share) in enumerate(sorted(known.items(), key=lambda item: -item[1])):
        y, width = 22 * i, (580 - left) * min(max(share, 0.0), 1.0)
        parts.append(_text(left - 8, y + 14, key, letters, "tick end"))
        parts.append(f'<rect x="{left:.1f}" y="{y + 3}" width="{width:.1f}" height="15" fill="{COLOURS[0]}"/>')
        parts.append(f'<text x="{left + 6 + width:.1f}" y="{y + 14}" class="tick">{share:.0%}</text>')
    return f'<div class="one"><svg viewBox="0 0 620 {22 * len(known)}" role="img">{"".join(parts)}</svg></div>'


def parallel_chart(axes: Mapping[str, Axis], lines: Sequence[Mapping[str, Any]]) -> str:
    """A line for each trial through its values, best trial first; one without a value leaves that axis out."""
    if len(lines) < 2 or len(axes) < 2:
        return ""
    width, height, top, bottom = 948, 320, 44, 12
    slot = (width - 120) / (len(axes) - 1)
    across = {key: 60 + i * slot for i, key in enumerate(axes)}

    def down(share: float) -> float:
        return height - bottom - min(max(share, 0.0), 1.0) * (height - top - bottom)

    parts = []
    thin = 1.3 if len(lines) <= _MANY else 0.6
    for rank, values in reversed(list(enumerate(lines))):
        placed = ((across[key], axes[key].place(value)) for key, value in values.items())
        places = [(x, down(share)) for x, share in placed if share is not None]
        colour = _shade(1 - rank / (len(lines) - 1)) if rank else COLOURS[1]
        parts.append(_polyline(places, f'stroke="{colour}" stroke-width="{thin if rank else 2.6}"'))
    for i, (key, axis) in enumerate(axes.items()):
        rows = 1 if _LETTER * (max(map(len, axes)) + 1) < slot else 2
        x, y = across[key], top - 14 - 15 * (i % rows)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}" stroke="#57606a"/>')
        parts.append(_text(x, y, key, int(min(slot * rows, 300) / _LETTER) - 1, "tick middle"))
        for share, text in axis.ticks[:: -(-len(axis.ticks) // 16)]:
            parts.append(_text(x + 5, down(share) + 4, text, int(min(slot, 220) / _LETTER) - 2, "tick halo"))
    legend = (
        f'<span style="color:{COLOURS[1]}">&#9644;</span> the best'
        f' <span style="color:{_shade(1.0)}">&#9644;</span> good <span style="color:{_shade(0.0)}">&#9644;</span> bad'
    )
    return (
        f"<figure><figcaption>complete trials <small>{legend}</small></figcaption>"
        f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg></figure>'
    )


def metric_axis(values: Sequence[float], mode: str) -> Axis:
    """An axis of results; those far worse than most lie beyond its end and do not flatten the rest."""
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
    reach = _FAR * (high - low)
    if len(ordered) < 8 or reach == 0:
        return number_axis(ordered)
    return number_axis([y for y in ordered if (y >= low - reach if mode == "max" else y <= high + reach)])


def value_axis(values: Sequence[Any], *, log: bool) -> Axis:
    """An axis of a parameter's values: of numbers, or of a few values that recur, as they are written."""
    texts = {written(value): value for value in values}
    are_numbers, are_few = all(map(is_number, values)), len(texts) <= _FEW and len(values) >= 2 * len(texts)
    if are_numbers and not are_few and len(texts) > 1:
        return number_axis(values, log=log and min(values) > 0)
    words = word_axis(sorted(texts, key=texts.__getitem__ if are_numbers else _natural))
    ticks = [(place, f"{texts[word]:g}" if are_numbers else word) for place, word in words.ticks]
    return Axis(place=lambda value: words.place(written(value)), ticks=ticks, is_words=True)


def written(value: Any) -> str:
    """A value as a person writes it in an override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    return repr(float(value)) if isinstance(value, float) else str(value)


def shortened(text: str, letters: int) -> str:
    """Both ends of a text that is too long: what names have in common often stands at one of them."""
    tail = max(letters - 1, 2) // 2
    return text if len(text) <= letters else f"{text[: max(letters - 1 - tail, 1)]}…{text[-tail:]}"


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that has a place on an axis; true and false are none."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and bool(abs(value) < 1e300)


def _natural(text: str) -> str:
    """What sorts a text as a person would: [8] before [16], [16] before [16,8]."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(12), text.strip("[]"))


def _best_so_far(dots: Sequence[Dot], mode: str) -> list[tuple[int, float]]:
    """The best value up to each trial."""
    better = max if mode == "max" else min
    steps: list[tuple[int, float]] = []
    for dot in sorted(dots, key=lambda dot: dot.number):
        steps.append((dot.number, better(dot.y, steps[-1][1]) if steps else dot.y))
    return steps


def _circles(plot: _Plot, dots: Sequence[Dot], spread: float = 0.0) -> list[str]:
    small = 1.0 if len(dots) <= _MANY else 0.7
    parts = []
    for dot in sorted(dots, key=lambda dot: ["pruned", "complete", "best"].index(dot.kind)):
        x, y = plot.at(dot.x, dot.y)
        x += spread * (dot.number * 0.618034 % 1 - 0.5)  # golden ratio: neighbours never fall together
        about = f"<title>trial {dot.number}: {dot.y:.6g}</title>"
        radius = 4.5 if dot.kind == "best" else 3 * small
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" {_MARKS[dot.kind]}>{about}</circle>')
    return parts


def _stroke(kind: str, lines: int) -> str:
    """The stroke of one among so many lines: the more there are, the fainter each."""
    if kind == "best":
        return f'stroke="{COLOURS[1]}" stroke-width="2.4"'
    width, opacity = (1.2, 0.55) if lines <= _MANY else (0.7, 0.25)
    return f'stroke="{COLOURS[0] if kind == "complete" else _GREY}" stroke-width="{width}" stroke-opacity="{opacity}"'


def _polyline(places: Sequence[tuple[float, float]], stroke: str, title: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    about = f"<title>{html.escape(title)}</title>" if title else ""
    return f'<polyline points="{path}" fill="none" {stroke}>{about}</polyline>'


def _text(x: float, y: float, text: str, letters: int, kind: str) -> str:
    """A text shortened to its room, whole when pointed at."""
    short = shortened(text, letters)
    about = f"<title>{html.escape(text)}</title>" if short != text else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{html.escape(short)}{about}</text>'


def _legend(names: Mapping[str, str]) -> str:
    colours = {"best": COLOURS[1], "complete": COLOURS[0], "pruned": _GREY}
    signs = {"best": "&#9679;", "complete": "&#9679;", "pruned": "&#9675;"}
    return " ".join(f'<span style="color:{colours[kind]}">{signs[kind]}</span> {name}' for kind, name in names.items())


def far_worse(axis: Axis, values: Sequence[float]) -> str:
    """A word on results beyond the end of their axis; nothing where all have room."""
    count = sum(not -1e-6 <= (axis.place(value) or 0.0) <= 1 + 1e-6 for value in values)
    return f" ({count:,} far worse at the edge)" if count else ""


def _shade(share: float) -> str:
    """A blue between light, 0, and dark, 1."""
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in zip(_WORST, _GOOD, strict=True))
