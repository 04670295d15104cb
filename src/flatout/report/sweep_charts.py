"""Charts of a sweep: the result of each trial in order, while training, and over each parameter.

They take plain points, not trials. One colour means one thing in all of them: orange is the best
trial, blue are complete ones, grey and hollow are pruned ones. The reader points at a mark to see
its trial.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeGuard

from flatout.errors import printable
from flatout.report import figures
from flatout.report.figures import Chart, add_axes, draw_svg, drawing, explain, format_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_MANY = 100
_BLUE, _ORANGE = figures.COLOURS[:2]
# kinds of trials, the last one drawn on top
_KINDS = {"pruned": "#8b949e", "complete": _BLUE, "best": _ORANGE}


@dataclass(frozen=True, slots=True)
class Dot:
    """The result of one trial; `kind` is best, complete or pruned."""

    number: int
    kind: str
    x: Any
    y: float


def history_chart(dots: Sequence[Dot], *, metric: str, mode: str) -> Chart | None:
    """Values of complete trials in their order, with the best so far; `x` of a dot is the number of
    the trial.
    """
    if not dots:
        return None
    values = [dot.y for dot in dots]
    title = f"{metric} of each trial"
    results = metric_scale(values, mode)
    numbers, bests = zip(*best_so_far(dots, mode), strict=True)
    with drawing() as figure:
        axes = _add_scaled(figure, number_scale([dot.number for dot in dots]), results, "trial")
        places = [results.clip(best) for best in bests]
        axes.plot(numbers, places, color=_ORANGE, linewidth=1.6, drawstyle="steps-post", zorder=1)
        _add_dots(axes, dots, results)
        svg = draw_svg(figure, title)
    legend = [("a trial", _BLUE, "●"), ("the best so far", _ORANGE, "●")]
    return Chart(title=title, svg=svg, legend=legend, note=far_worse(results, values))


def learning_chart(lines: Sequence[Sequence[Dot]], *, metric: str, mode: str) -> Chart | None:
    """What all trials reported over their steps, a line of dots each; pruned ones end in a hollow
    dot.
    """
    from matplotlib.collections import LineCollection

    lines = sorted(filter(None, lines), key=lambda line: list(_KINDS).index(line[0].kind))
    if not lines:
        return None
    dots, ends = [dot for line in lines for dot in line], [line[-1] for line in lines]
    results = metric_scale([dot.y for dot in dots], mode)
    title = f"{metric} while training"
    with drawing() as figure:
        axes = _add_scaled(figure, number_scale([dot.x for dot in dots]), results, "validation")
        segments = [[(dot.x, results.clip(dot.y)) for dot in thin(line)] for line in lines]
        # the more lines, the fainter each
        width, opacity = (1.2, 0.55) if len(lines) <= _MANY else (0.7, 0.25)
        colours = [_KINDS[end.kind] for end in ends]
        widths = [2.4 if end.kind == "best" else width for end in ends]
        opacities = [1.0 if end.kind == "best" else opacity for end in ends]
        drawn = LineCollection(
            segments, colors=colours, linewidths=widths, alpha=opacities, clip_on=False
        )
        explain(drawn, [f"trial {end.number}" for end in ends])
        axes.add_collection(drawn, autolim=False)
        _add_dots(axes, ends, results)
        svg = draw_svg(figure, title)
    worst = [(min if mode == "max" else max)(dot.y for dot in line) for line in lines]
    names = {"best": "the best", "complete": "complete", "pruned": "not finished"}
    kinds = {end.kind for end in ends}
    shown = ((kind, name) for kind, name in names.items() if kind in kinds)
    legend = [(name, _KINDS[kind], "○" if kind == "pruned" else "●") for kind, name in shown]
    return Chart(title=title, svg=svg, legend=legend, note=far_worse(results, worst))


def slice_chart(key: str, dots: Sequence[Dot], results: Scale, *, log: bool) -> Chart | None:
    """Results over one parameter; dots above a word are spread a little, so that each is seen."""
    if not dots:
        return None
    values = value_scale([dot.x for dot in dots], log=log)
    with drawing(300, 190) as figure:
        axes = _add_scaled(figure, values, results)
        # by multiples of the golden ratio, which modulo 1 never fall together
        spread = 0.4 if values.words else 0.0
        places = (values.place(dot.x) + spread * (dot.number * 0.618034 % 1 - 0.5) for dot in dots)
        _add_dots(axes, [replace(dot, x=x) for dot, x in zip(dots, places, strict=True)], results)
        svg = draw_svg(figure, key)
    return Chart(title=shortened(key, 40), svg=svg)


def best_so_far(dots: Sequence[Dot], mode: str) -> list[tuple[int, float]]:
    """The best value up to each trial."""
    ordered = sorted(dots, key=lambda dot: dot.number)
    bests = itertools.accumulate((dot.y for dot in ordered), max if mode == "max" else min)
    return [(dot.number, best) for dot, best in zip(ordered, bests, strict=True)]


def thin(line: Sequence[Dot]) -> list[Dot]:
    """At most about a hundred of the dots, the last one among them."""
    return [*line[:: -(-len(line) // 100)], line[-1]]


def far_worse(results: Scale, values: Sequence[float]) -> str:
    """A note on results beyond the end of their scale; empty when there are none."""
    near = 1e-6 * (results.high - results.low)
    count = sum(not results.low - near <= value <= results.high + near for value in values)
    return f" ({count:,} far worse at the edge)" if count else ""


def _add_scaled(figure: Figure, x: Scale, results: Scale, x_label: str = "") -> Axes:
    axes = add_axes(figure)
    axes.set_xlabel(x_label, loc="right", labelpad=2)
    _set_scale(axes, "x", x)
    _set_scale(axes, "y", results)
    return axes


def _set_scale(axes: Axes, side: str, scale: Scale) -> None:
    """Scale, ends and ticks of an axis; words are shortened to their room, in two rows where that
    helps.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator

    axis: Axis = {"x": axes.xaxis, "y": axes.yaxis}[side]
    if scale.words:
        slot = 236 / len(scale.names)
        rows = 2 if figures.LETTER * (max(map(len, scale.names)) + 1) > slot else 1
        letters = max(int(slot * rows / figures.LETTER) - 1, 1)
        shown = [
            "\n" * (i % rows) + shortened(printable(name), letters)
            for i, name in enumerate(scale.names)
        ]
        axis.set_ticks(range(len(shown)), shown)
        for label, name in zip(axis.get_ticklabels(), scale.names, strict=True):
            explain(label, [name])  # whole when pointed at
    elif scale.is_log:
        axes.set(**{f"{side}scale": "log"})
        axis.set_major_locator(
            LogLocator(subs=(1, 2, 5) if scale.high < 100 * scale.low else (1,), numticks=7)
        )
        axis.minorticks_off()
    else:
        axis.set_major_locator(MaxNLocator(nbins=7, steps=figures.STEPS))
    if not scale.words:
        format_numbers(axis)
    axes.set(**{f"{side}lim": (scale.low, scale.high)})


def _add_dots(axes: Axes, dots: Sequence[Dot], results: Scale) -> None:
    for kind, colour in _KINDS.items():
        if not (shown := [dot for dot in dots if dot.kind == kind]):
            continue
        size = 9.0 if kind == "best" else 6.0 if len(dots) <= _MANY else 4.2
        inside, edge, width = (
            (figures.PAPER, colour, 1.0) if kind == "pruned" else (colour, figures.PAPER, 0.5)
        )
        x, y = [dot.x for dot in shown], [results.clip(dot.y) for dot in shown]
        drawn = axes.scatter(
            x, y, s=size**2, facecolors=inside, edgecolors=edge, linewidths=width, clip_on=False
        )
        drawn.set(alpha=0.75 if kind == "complete" else None, zorder=3)
        explain(drawn, [f"trial {dot.number}: {dot.y:.6g}" for dot in shown])


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The values of one axis: numbers between two ends, or words at equal distances."""

    low: float
    high: float
    words: Sequence[str] = ()  # in their order; empty for numbers
    names: Sequence[str] = ()  # what is written for each word
    is_log: bool = False

    def place(self, value: Any) -> float:
        """Where a value stands in the axis' own numbers, never beyond its ends."""
        return self.words.index(written(value)) if self.words else self.clip(value)

    def clip(self, value: float) -> float:
        return min(max(float(value), self.low), self.high)


def metric_scale(values: Sequence[float], mode: str) -> Scale:
    """A scale of results; those far worse than most lie beyond its end and do not
    flatten the rest.
    """
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
    reach = 5 * (high - low)
    if len(ordered) < 8 or reach == 0:
        return number_scale(ordered)
    return number_scale(
        [y for y in ordered if (y >= low - reach if mode == "max" else y <= high + reach)]
    )


def number_scale(values: Sequence[float], *, log: bool = False) -> Scale:
    """A scale that ends at round numbers; `log`, for numbers above 0: equal distances
    are factors.
    """
    from matplotlib.ticker import MaxNLocator

    low, high = float(min(values)), float(max(values))
    if log:
        margin = max((high / low) ** 0.04, 1.01)
        return Scale(low=low / margin, high=high * margin, is_log=True)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-3):
        margin = max(0.5, abs(low) * 1e-9)
        low, high = low - margin, high + margin
    are_counts = all(float(value).is_integer() for value in values)
    ticks = MaxNLocator(
        nbins=7 if are_counts else 6, integer=are_counts, steps=figures.STEPS
    ).tick_values(low, high)
    return Scale(low=float(ticks[0]), high=float(ticks[-1]))


def value_scale(values: Sequence[Any], *, log: bool) -> Scale:
    """A scale of a parameter's values: of numbers, or of a few values that recur, as they are
    written.
    """
    texts = {written(value): value for value in values}
    are_numbers = all(map(is_number, values))
    are_few = len(texts) <= 8 and len(values) >= 2 * len(texts)
    if are_numbers and not are_few and len(texts) > 1:
        return number_scale(values, log=log and min(values) > 0)
    words = sorted(texts, key=texts.__getitem__ if are_numbers else _natural)
    names = [f"{texts[word]:g}" if are_numbers else word for word in words]
    return Scale(low=-0.5, high=len(words) - 0.5, words=words, names=names)


def written(value: Any) -> str:
    """A value as you write it in an override."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    return repr(float(value)) if isinstance(value, float) else str(value)


def shortened(text: str, letters: int) -> str:
    """Both ends of a text that is too long: what names have in common often stands at
    one of them.
    """
    tail = max(letters - 1, 2) // 2
    return text if len(text) <= letters else f"{text[: max(letters - 1 - tail, 1)]}…{text[-tail:]}"


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that has a place on an axis; true and false are not."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and bool(abs(value) < 1e300)


def _natural(text: str) -> str:
    """Sort key of a text as you expect it: [8] before [16], [16] before [16,8]."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(12), text.strip("[]"))
