"""Charts as a page shows them: no text becomes markup, every text survives, the same data give the
same bytes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from xml.etree import ElementTree

import matplotlib
import pytest

from flatout.report.figures import (
    INK,
    PAPER,
    Chart,
    Curve,
    add_axes,
    draw_svg,
    drawing,
    explain,
    line_chart,
)

HOSTILE = [
    "<script>alert(1)</script>",
    "\"'&amp;",
    "$x^{2}$ \\frac",
    "日本 🚀",
    "_hidden",
    "a\nb\u2028c\x00\ud800",
]


def drawn(label: str = "a chart", texts: list[str] | None = None, colour: str = INK) -> str:
    with drawing() as figure:
        axes = add_axes(figure)
        dots = axes.scatter(range(2), range(2), color=colour, clip_on=False)
        explain(dots, texts or ["first", "second"])
        axes.set_xlabel(
            (texts or ["x"])[0].replace("\n", " ").replace("\ud800", "").replace("\x00", "")
        )
        return draw_svg(figure, label)


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_markup_and_every_text_can_be_read(text):
    svg = drawn(text, [text, "second"])
    root = ElementTree.fromstring(svg)
    assert {element.tag for element in root.iter()} <= {
        *("svg", "g", "defs", "path", "use", "text", "title", "clipPath", "rect"),
    }
    first, second = (title.text for title in root.iter("title"))
    assert second == "second"
    assert first[0] == text[0]
    assert len(first) >= len(text)
    assert len({text for text in root.itertext() if text.strip()} & {first}) == 1


@pytest.mark.parametrize("text", HOSTILE[:5])
def test_a_hostile_name_of_a_curve_stays_in_the_legend(text):
    chart = line_chart(text, [Curve(text, [(1, 2.0), (2, 3.0)])], x_label=text)
    assert chart.legend[0][0] == chart.title == text
    labels = [label.text for label in ElementTree.fromstring(chart.svg).iter("text")]
    assert text in labels


def test_colours_of_ink_and_paper_are_those_of_the_page():
    assert "var(--ink)" in drawn(colour=INK)
    assert "var(--paper)" in drawn(colour=PAPER)
    assert not re.search(f"{INK}|{PAPER}|font-family|https?://|<metadata", drawn())


def test_the_style_a_user_has_set_changes_no_chart():
    plain = drawn()
    with matplotlib.rc_context(
        {
            "text.usetex": True,
            "svg.fonttype": "path",
            "axes.facecolor": "red",
            "font.size": 40,
        }
    ):
        assert drawn() == plain
        assert matplotlib.rcParams["font.size"] == 40


def test_a_long_run_is_drawn_whole_and_small():
    steps = range(1, 5001)
    chart = line_chart(
        "loss", [Curve("train/loss", [(n, 1 / n) for n in steps]), Curve("val", [(5000, 0.5)])]
    )
    lines = [
        path.get("d")
        for path in ElementTree.fromstring(chart.svg).iter("path")
        if "#2a83a3" in path.get("style", "")
    ]
    assert lines[0].split("L")[-1].split()[0] == "448"  # the last step stands at the right end
    assert isinstance(chart, Chart)
    assert len(chart.svg) < 100_000


def test_importing_the_pages_imports_no_matplotlib_and_drawing_opens_no_window():
    code = """
import sys
import flatout.report.page, flatout.report.dashboard, flatout.report.sweep_page
assert not any(name.split(".")[0] in ("matplotlib", "jinja2") for name in sys.modules), "too early"
from flatout.report.figures import Curve, line_chart
line_chart("loss", [Curve("a", [(1, 2.0)])])
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
