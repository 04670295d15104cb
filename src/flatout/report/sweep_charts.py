"""Charts of a sweep: the result of each trial in order, while training, and over each parameter.

They take plain points, not trials. One colour means one thing in all of them: orange is the best
trial, blue are complete ones, grey and hollow are pruned ones. Pointing at a mark shows its trial.
"""

from __future__ import annotations

import itertools
import operator
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

_MANY = 100  # dots or lines; of more, each is drawn smaller and fainter
_BLUE, _ORANGE = figures.COLOURS[:2]
# kinds of trials, the last one drawn on top
_KINDS = {"pruned": "#8b949e", "complete": _BLUE, "best": _ORANGE}


@dataclass(frozen=True, slots=True)
class Dot:
    """The result of one trial, as a mark of a chart."""

    number: int  # of the trial
    kind: str  # best, complete or pruned
    x: Any  # a number, or a parameter's value of any kind
    y: float


def history_chart(dots: Sequence[Dot], *, metric: str, mode: str) -> Chart | None:
    """Values of complete trials in their order, with a line of the best so far.

    `x` of a dot is the number of its trial; `mode`, max or min, says which value is the best.
    """
    if not dots:
        return None
    values = [dot.y for dot in dots]
    title = f"{metric} of each trial"
    results = metric_scale(values, mode)
    numbers, bests = zip(*best_so_far(dots, mode), strict=True)
    with drawing() as figure:
        axes = _add_scaled(figure, number_scale([dot.number for dot in dots]), results, "trial")
        heights = [results.clip(best) for best in bests]
        axes.plot(numbers, heights, color=_ORANGE, linewidth=1.6, drawstyle="steps-post", zorder=1)
        _add_dots(axes, dots, results)
        svg = draw_svg(figure, title)
    legend = [("a trial", _BLUE, "●"), ("the best so far", _ORANGE, "●")]
    return Chart(title=title, svg=svg, legend=legend, note=far_worse(results, values))


def learning_chart(lines: Sequence[Sequence[Dot]], *, metric: str, mode: str) -> Chart | None:
    """The values that trials reported while they trained, one line of dots for each trial."""
    from matplotlib.collections import LineCollection

    order = list(_KINDS)
    lines = sorted(filter(None, lines), key=lambda line: order.index(line[0].kind))
    if not lines:
        return None
    dots = list(itertools.chain.from_iterable(lines))
    ends = [line[-1] for line in lines]
    results = metric_scale([dot.y for dot in dots], mode)
    title = f"{metric} while training"
    with drawing() as figure:
        axes = _add_scaled(figure, number_scale([dot.x for dot in dots]), results, "validation")
        # the more lines, the fainter each
        width, opacity = (1.2, 0.55) if len(lines) <= _MANY else (0.7, 0.25)
        looks = dict.fromkeys(order, (width, opacity)) | {"best": (2.4, 1.0)}
        # one collection: matplotlib draws hundreds of single lines far more slowly
        drawn = LineCollection(
            [_segment(line, results) for line in lines],
            colors=[_KINDS[end.kind] for end in ends],
            linewidths=[looks[end.kind][0] for end in ends],
            alpha=[looks[end.kind][1] for end in ends],
            clip_on=False,
        )
        explain(drawn, [f"trial {end.number}" for end in ends])
        axes.add_collection(drawn, autolim=False)
        _add_dots(axes, ends, results)
        svg = draw_svg(figure, title)
    worst_of = min if mode == "max" else max
    worst = [worst_of(line, key=operator.attrgetter("y")).y for line in lines]
    marks = {
        "best": ("the best", "●"),
        "complete": ("complete", "●"),
        "pruned": ("not finished", "○"),
    }
    kinds = {end.kind for end in ends}
    legend = [(name, _KINDS[kind], sign) for kind, (name, sign) in marks.items() if kind in kinds]
    return Chart(title=title, svg=svg, legend=legend, note=far_worse(results, worst))


def _segment(line: Sequence[Dot], results: Scale) -> list[tuple[float, float]]:
    return [(dot.x, results.clip(dot.y)) for dot in thin(line)]


def slice_chart(key: str, dots: Sequence[Dot], results: Scale, *, log: bool) -> Chart | None:
    """Results over one parameter; dots above a word are spread sideways, so that each is seen."""
    if not dots:
        return None
    values = value_scale([dot.x for dot in dots], log=log)
    with drawing(300, 190) as figure:
        axes = _add_scaled(figure, values, results)
        spread = 0.4 if values.words else 0.0
        placed = []
        for dot in dots:
            # multiples of the golden ratio never fall together modulo 1: trials 0, 1, 2, 3 go to
            # -0.50, 0.12, -0.26, 0.35 of the spread
            shift = spread * (dot.number * 0.618034 % 1 - 0.5)
            placed.append(replace(dot, x=values.place(dot.x) + shift))
        _add_dots(axes, placed, results)
        svg = draw_svg(figure, key)
    return Chart(title=shortened(key, 40), svg=svg)


def best_so_far(dots: Sequence[Dot], mode: str) -> list[tuple[int, float]]:
    """The best value up to each trial, as (number, value): 3, 5, 4 give 3, 5, 5 by max."""
    ordered = sorted(dots, key=lambda dot: dot.number)
    bests = itertools.accumulate((dot.y for dot in ordered), max if mode == "max" else min)
    return list(zip((dot.number for dot in ordered), bests, strict=True))


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
    """Set scale, ends and ticks of an axis; words that are too long are shortened to their room."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    axis: Axis = {"x": axes.xaxis, "y": axes.yaxis}[side]
    if scale.words:
        slot = 236 / len(scale.names)  # pixels a word: the axis is 236 wide
        # long words alternate between two rows, which gives each twice the room
        rows = 2 if figures.LETTER * (max(map(len, scale.names)) + 1) > slot else 1
        letters = max(int(slot * rows / figures.LETTER) - 1, 1)
        shown = [
            "\n" * (index % rows) + shortened(printable(name), letters)
            for index, name in enumerate(scale.names)
        ]
        axis.set_ticks(range(len(shown)), shown)
        for label, name in zip(axis.get_ticklabels(), scale.names, strict=True):
            explain(label, [name])  # whole when pointed at
    elif scale.is_log:
        axes.set(**{f"{side}scale": "log"})
        # below two decades 1, 10, 100 would be too few ticks
        ticks = (1, 2, 5) if scale.high < 100 * scale.low else (1,)
        axis.set_major_locator(LogLocator(subs=ticks, numticks=7))
        axis.minorticks_off()
    else:
        axis.set_major_locator(MaxNLocator(nbins=7, steps=figures.STEPS))
    if not scale.words:
        format_numbers(axis)
    axes.set(**{f"{side}lim": (scale.low, scale.high)})


def _add_dots(axes: Axes, dots: Sequence[Dot], results: Scale) -> None:
    size = 6.0 if len(dots) <= _MANY else 4.2
    for kind, colour in _KINDS.items():
        if not (shown := [dot for dot in dots if dot.kind == kind]):
            continue
        is_hollow = kind == "pruned"
        drawn = axes.scatter(
            [dot.x for dot in shown],
            [results.clip(dot.y) for dot in shown],
            s=81 if kind == "best" else size**2,  # square pixels
            facecolors=figures.PAPER if is_hollow else colour,
            edgecolors=colour if is_hollow else figures.PAPER,
            linewidths=1.0 if is_hollow else 0.5,
            clip_on=False,
        )
        drawn.set(alpha=0.75 if kind == "complete" else None, zorder=3)
        explain(drawn, [f"trial {dot.number}: {dot.y:.6g}" for dot in shown])


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The values of one axis: numbers between two ends, or words at equal distances."""

    low: float
    high: float
    words: Sequence[str] = ()  # as `written` gives them, in their order; empty for numbers
    names: Sequence[str] = ()  # the label of each word
    is_log: bool = False

    def place(self, value: Any) -> float:
        """The position of a value on the axis; a word's is its index."""
        return self.words.index(written(value)) if self.words else self.clip(value)

    def clip(self, value: float) -> float:
        """The value, or the end of the axis that it lies beyond."""
        return min(max(float(value), self.low), self.high)


def metric_scale(values: Sequence[float], mode: str) -> Scale:
    """A scale of results that leaves out those far worse than most.

    Far worse is five times the distance of the quartiles beyond the worse one. One diverged trial
    would otherwise press all others into one line.
    """
    ordered = sorted(values)
    low = ordered[len(ordered) // 4]
    high = ordered[-1 - len(ordered) // 4]
    reach = 5 * (high - low)
    if len(ordered) < 8 or reach == 0:
        return number_scale(ordered)
    if mode == "max":
        return number_scale([value for value in ordered if value >= low - reach])
    return number_scale([value for value in ordered if value <= high + reach])


def number_scale(values: Sequence[float], *, log: bool = False) -> Scale:
    """A scale that ends at round numbers; with `log`, for numbers above 0, equal distances are
    equal factors.
    """
    from matplotlib.ticker import MaxNLocator

    low, high = float(min(values)), float(max(values))
    if log:
        margin = max((high / low) ** 0.04, 1.01)
        return Scale(low=low / margin, high=high * margin, is_log=True)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-3):
        # all values are equal but for rounding
        margin = max(0.5, abs(low) * 1e-9)
        low -= margin
        high += margin
    are_counts = all(float(value).is_integer() for value in values)
    bins = 7 if are_counts else 6
    locator = MaxNLocator(nbins=bins, integer=are_counts, steps=figures.STEPS)
    ticks = locator.tick_values(low, high)
    return Scale(low=float(ticks[0]), high=float(ticks[-1]))


def value_scale(values: Sequence[Any], *, log: bool) -> Scale:
    """A scale of a parameter's values: numbers, or words at equal distances.

    Numbers count as words if they are few and recur, like 16, 32 and 64 in ten trials.
    """
    values_of_word = {written(value): value for value in values}
    are_numbers = all(map(is_number, values))
    are_few = len(values_of_word) <= 8 and len(values) >= 2 * len(values_of_word)
    if are_numbers and not are_few and len(values_of_word) > 1:
        return number_scale(values, log=log and min(values) > 0)
    if are_numbers:
        words = sorted(values_of_word, key=values_of_word.__getitem__)
        names = [f"{values_of_word[word]:g}" for word in words]
    else:
        words = sorted(values_of_word, key=_natural)
        names = words
    return Scale(low=-0.5, high=len(words) - 0.5, words=words, names=names)


def written(value: object) -> str:
    """A value as you write it in an override: null, true, [8,16], 0.001."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    return repr(float(value)) if isinstance(value, float) else str(value)


def shortened(text: str, letters: int) -> str:
    """Both ends of a text that is too long, since names often differ only at one of them."""
    if len(text) <= letters:
        return text
    tail = max(letters - 1, 2) // 2
    head = max(letters - 1 - tail, 1)
    return f"{text[:head]}…{text[-tail:]}"


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number that has a place on an axis; true and false are not."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return abs(float(value)) < 1e300


def _natural(text: str) -> str:
    """Sort key of a text as you expect it: [8] before [16], [16] before [16,8]."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(12), text.strip("[]"))
