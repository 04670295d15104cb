"""Draw charts with matplotlib, as inline SVG for the pages.

A chart follows its page: ink, grid and paper are CSS variables, so it is readable on a dark screen
and in print. Texts stay texts. The same data give the same bytes. matplotlib is imported only when
a chart is drawn. `line_chart` draws curves; other charts combine `drawing`, `add_axes`, `draw_svg`.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from markupsafe import Markup

from flatout.errors import printable, without_codes

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

WIDTH = 460  # pixels of an ordinary chart
HEIGHT = 220
# of curves, in their order
COLOURS = (
    "#2a83a3",
    "#c8553d",
    "#6a994e",
    "#7b5ea7",
    "#b08900",
    "#5c677d",
    "#2a9d8f",
    "#d08c60",
    "#9d4e6b",
    "#8fa35a",
)
STEPS = (1, 2, 5, 10)  # distance between ticks, times a power of ten
LETTER = 6.2  # pixels: width of a letter in an ordinary text
INK = "#1b1f23"
MUTED = "#57606a"
LINE = "#d8dee4"
GRID = "#e6eaee"
PAPER = "#ffffff"
# matplotlib draws with plain colours; `_simplify` puts the page's variable in the place of each
_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    LINE: "var(--line)",
    GRID: "var(--grid)",
    PAPER: "var(--paper)",
}
_STYLE = Path(__file__).with_name("figures.mplstyle")
# An artist's id carries the texts of its marks into the SVG, where `_simplify` finds them.
_MARKED = "marked:"
_BETWEEN = "\u2028"  # `printable` leaves no such separator in a text


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart as a template shows it: caption, legend, a note after the legend, picture."""

    title: str
    svg: Markup
    legend: Sequence[tuple[str, str, str]] = ()  # name, colour and sign of each mark
    note: str = ""


@contextmanager
def drawing(width: float = WIDTH, height: float = HEIGHT, dpi: int = 72) -> Iterator[Figure]:
    """An empty figure in our style, whatever style the user set; sizes are pixels at 72 dpi."""
    from matplotlib.figure import Figure
    from matplotlib.style import context

    with context(_STYLE, after_reset=True), ignoring_missing_glyphs():
        yield Figure(figsize=(width / 72, height / 72), dpi=dpi, facecolor=PAPER)


@contextmanager
def ignoring_missing_glyphs() -> Iterator[None]:
    """Silence matplotlib where its font lacks a letter: in SVG the browser's font has it."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"Glyph .* missing from font", category=UserWarning
        )
        yield


def add_axes(
    figure: Figure, *, left: float = 52, right: float = 12, top: float = 14, bottom: float = 34
) -> Axes:
    """Axes with margins in pixels."""
    width, height = figure.get_size_inches() * 72
    axes = figure.add_axes(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height)
    )
    axes.patch.set_visible(False)
    axes.grid(axis="y", clip_on=False)
    return axes


def explain(artist: Artist, texts: Sequence[str]) -> None:
    """Give each mark of an artist a text that the browser shows when you point at it.

    One text for each mark, in the order drawn; a single text is for the whole artist.
    """
    artist.set_gid(_MARKED + _BETWEEN.join(map(printable, texts)))


def draw_svg(figure: Figure, label: str) -> Markup:
    """The figure as SVG to stand inside a page; screen readers read `label`."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.hashsalt": printable(label)}):  # charts of one page share no ids
        figure.patch.set_visible(False)
        figure.savefig(
            file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    root = ElementTree.fromstring(file.getvalue())  # noqa: S314 (matplotlib wrote it just now)
    for element in root.iter():  # inside of HTML, SVG needs no namespaces
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    for element in root.iter():
        _simplify(element)
    del root.attrib["width"], root.attrib["height"]
    root.attrib |= {"role": "img", "aria-label": printable(label)}
    # the writer of XML has escaped all texts
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # noqa: S704


def _simplify(element: ElementTree.Element) -> None:
    """Use the page's colours and font, add the texts of `explain`, drop what a page can spare."""
    for child in list(element):
        if child.tag == "style" or (child.tag == "g" and not len(child)):
            element.remove(child)
    is_text = element.tag in ("text", "title")
    element.text = without_codes(element.text or "") if is_text else None
    element.tail = None
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    if style := element.get("style"):
        for colour, variable in _VARIABLES.items():
            style = style.replace(colour, variable)
        style = re.sub(r"font: ([\d.]+px) [^;]*", r"font-size: \1", style)
        element.attrib["style"] = re.sub(r"font-family: [^;]*;? ?", "", style)
    # a tenth of a pixel is fine enough
    for name in {"d", "x", "y", "transform"} & element.attrib.keys():
        element.attrib[name] = re.sub(r"(\.\d)\d+|\s+(?=\s)", r"\1", element.attrib[name])
    if element.tag == "g" and (name := element.attrib.pop("id", "")).startswith(_MARKED):
        texts = name.removeprefix(_MARKED).split(_BETWEEN)
        hidden = {mark for definitions in element.iter("defs") for mark in definitions.iter()}
        marks = [
            mark for mark in element.iter() if mark.tag in ("path", "use") and mark not in hidden
        ]
        for mark, text in zip(marks if len(texts) > 1 else [element], texts, strict=True):
            ElementTree.SubElement(mark, "title").text = without_codes(text)


@dataclass(frozen=True, slots=True)
class Curve:
    """One named line of points (step, value)."""

    name: str
    points: Sequence[tuple[float, float]]


def fold_curves(sizes: NDArray[np.generic], scores: NDArray[np.generic]) -> list[Curve]:
    """The learning curve of each fold: `[folds, sizes]` scores at these numbers of rows."""
    curves = []
    for number, scores_of_fold in enumerate(scores.tolist(), 1):
        points = list(zip(sizes.tolist(), scores_of_fold, strict=True))
        curves.append(Curve(f"fold {number}", points))
    return curves


def line_chart(
    title: str, curves: Sequence[Curve], *, x_label: str = "step", doublings: bool = False
) -> Chart | None:
    """A chart of some curves; None if none has a point.

    With `doublings`, equal distances to the right are equal factors (1, 2, 4, …).
    """
    shown = []
    for curve in curves:
        points = [(x, y) for x, y in curve.points if math.isfinite(y) and (x > 0 or not doublings)]
        shown.append(Curve(curve.name, points))
    if not any(curve.points for curve in shown):
        return None
    with drawing() as figure:
        axes = add_axes(figure)
        if doublings:
            axes.set_xscale("log", base=2)
        for curve, colour in zip(shown, COLOURS, strict=False):
            dots = "o" if len(curve.points) <= 30 else ""
            axes.plot(
                *zip(*curve.points, strict=True),
                color=colour,
                marker=dots,
                markersize=5,
                clip_on=False,
            )
        format_numbers(axes.xaxis, "{:,.0f}" if doublings else "{:g}")
        format_numbers(axes.yaxis)
        axes.locator_params(axis="y" if doublings else "both", nbins=6, steps=STEPS)
        axes.set_xlabel(x_label, loc="right", labelpad=2)
        svg = draw_svg(figure, title)
    legend = [(curve.name, colour, "▬") for curve, colour in zip(shown, COLOURS, strict=False)]
    return Chart(title=title, svg=svg, legend=legend)


def format_numbers(axis: Axis, form: str = "{:g}") -> None:
    """Write each tick in full: matplotlib would move a factor or an offset to the axis' end."""
    axis.set_major_formatter(lambda value, _: form.format(value))
