"""The charts of a sweep: what is drawn where, and how values are written."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from tests.report.sweep_reports import MIXED, page, report

from flatout.report.figures import Chart
from flatout.report.sweep_charts import (
    Dot,
    best_so_far,
    far_worse,
    history_chart,
    is_number,
    learning_chart,
    metric_scale,
    number_scale,
    shortened,
    slice_chart,
    thin,
    value_scale,
    written,
)


def named(chart: Chart, kind: str) -> list[tuple[str, ElementTree.Element]]:
    """The marks of a chart that name their trial when pointed at, in the order drawn."""
    found = []
    for element in ElementTree.fromstring(chart.svg).iter():
        if (name := element.findtext("title")) and name.startswith("trial "):
            inside = [element, *element.findall(kind), *element.findall(f"g/{kind}")]
            found += [(name, mark) for mark in inside if mark.tag == kind]
    return found


def marks(chart: Chart, kind: str = "use") -> list[ElementTree.Element]:
    return [mark for _, mark in named(chart, kind)]


def names(chart: Chart, kind: str = "use") -> list[str]:
    return [name for name, _ in named(chart, kind)]


def points(mark: ElementTree.Element) -> list[tuple[float, float]]:
    numbers = list(map(float, re.findall(r"-?[0-9.]+", mark.get("d"))))
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_the_best_so_far_never_gets_worse():
    dots = [Dot(n, "complete", n, y) for n, y in enumerate([3.0, 1.0, 2.0, 0.0])]
    assert best_so_far(dots, "min") == [
        (0, 3.0),
        (1, 1.0),
        (2, 1.0),
        (3, 0.0),
    ]
    assert best_so_far(dots[::-1], "max") == [
        (0, 3.0),
        (1, 3.0),
        (2, 3.0),
        (3, 3.0),
    ]


def test_each_trial_is_a_dot_at_its_value_that_names_it():
    values = {
        4: 0.5,
        5: 1.0,
        6: 0.0,
        7: 0.25,
    }
    statuses = {5: "best"}
    dots = [
        Dot(number, statuses.get(number, "complete"), number, y) for number, y in values.items()
    ]
    chart = history_chart(dots, metric="val/accuracy", mode="max")
    # the best one on top
    assert names(chart) == ["trial 4: 0.5", "trial 6: 0", "trial 7: 0.25", "trial 5: 1"]
    places = [(float(mark.get("x")), float(mark.get("y"))) for mark in marks(chart)]
    by_value = sorted(zip([0.5, 0.0, 0.25, 1.0], (y for _, y in places), strict=True))
    heights = [height for _, height in by_value]
    assert heights == sorted(heights, reverse=True)  # further down the page is lower
    assert heights[0] - heights[2] == pytest.approx((heights[0] - heights[3]) / 2, abs=0.2)


def test_a_pruned_curve_ends_where_it_was_pruned_and_the_best_is_drawn_last():
    ends = [
        (0, "best", 100, 0.9),
        (1, "pruned", 50, 0.2),
        (2, "complete", 100, 0.5),
    ]
    lines = [[Dot(number, kind, 0, 0.1), Dot(number, kind, x, y)] for number, kind, x, y in ends]
    chart = learning_chart(lines, metric="val/accuracy", mode="max")
    assert names(chart, "path") == ["trial 1", "trial 2", "trial 0"]
    (left, _), *_ = points(marks(chart, "path")[0])
    ends = [points(mark)[-1][0] for mark in marks(chart, "path")]
    assert ends[0] == pytest.approx((ends[1] + left) / 2, abs=1)
    assert learning_chart([[]], metric="x", mode="max") is None


def test_a_long_curve_is_thinned_and_keeps_its_end():
    line = [Dot(0, "complete", n, n) for n in range(10_001)]
    assert len(thin(line)) <= 102
    assert thin(line)[-1] == line[-1]
    (drawn,) = marks(learning_chart([line], metric="x", mode="max"), "path")
    assert 50 <= len(points(drawn)) <= 102  # matplotlib leaves out points on a straight line
    assert points(drawn)[-1] == (448.0, 14.0)


def test_equal_factors_are_equal_steps_on_a_log_axis():
    scale = number_scale([1e-4, 1e-3, 1e-2], log=True)
    shares = [math.log(x / scale.low, scale.high / scale.low) for x in (1e-4, 1e-3, 1e-2)]
    assert shares == pytest.approx([0.037, 0.5, 0.963], abs=1e-3)
    dots = [Dot(n, "complete", 10.0**-n, 0.5) for n in range(1, 8)]
    places = [
        float(mark.get("x"))
        for mark in marks(slice_chart("a", dots, number_scale([0, 1]), log=True))
    ]
    assert len({round(a - b) for a, b in itertools.pairwise(places)}) == 1


@pytest.mark.parametrize(
    "values",
    [
        [3.0],
        [0.0],
        [1e20, 1e20],
        [5e-11, 6e-11],
        [1.0, 1.0 + 1e-9],
        [-4.0, 9.0],
        [1e299],
    ],
)
def test_an_axis_holds_its_values_and_has_ticks_that_differ(values):
    scale = number_scale(values)
    assert scale.low < scale.high
    assert all(scale.clip(value) == pytest.approx(value) for value in values)
    assert not far_worse(scale, values)
    chart = slice_chart(
        "a", [Dot(n, "complete", n, value) for n, value in enumerate(values)], scale, log=False
    )
    heights = {float(text.get("y")) for text in ElementTree.fromstring(chart.svg).iter("text")}
    assert len(heights) >= 3  # two ticks beside the chart, and those below it


def test_texts_lists_and_switches_stand_evenly_in_the_order_you_expect():
    assert value_scale([[256], [64], [256, 128], [64]], log=False).names == [
        "[64]",
        "[256]",
        "[256,128]",
    ]
    scale = value_scale([True, False], log=True)
    assert (scale.low, scale.place(False), scale.place(True), scale.high) == (-0.5, 0, 1, 1.5)


def test_a_few_numbers_that_recur_are_choices_and_others_are_a_range():
    assert value_scale([128, 32, 64] * 3, log=False).names == ["32", "64", "128"]
    assert not value_scale([128, 32, 64], log=False).words
    assert value_scale([0.3], log=True).words


def test_one_failure_does_not_flatten_the_other_results():
    values = [0.90 + n / 1000 for n in range(20)]
    scale = metric_scale([*values, 0.1], "max")
    assert 0.1 < scale.low <= 0.9
    assert scale.clip(0.1) == scale.low
    assert "1 far worse" in far_worse(scale, [*values, 0.1])
    assert far_worse(scale, values) == ""
    assert metric_scale([*values, 0.1], "min").low <= 0.1


def test_charts_without_anything_to_show_are_left_out():
    scale = number_scale([0.0, 1.0])
    assert history_chart([], metric="x", mode="max") is None
    assert slice_chart("a", [], scale, log=False) is None


def test_bars_of_importance_are_as_long_as_their_shares(tmp_path):
    found = page(
        tmp_path,
        report(
            *MIXED,
            importance={
                "model.widths": 0.25,
                "optim.lr": 0.75,
                "model.tied": math.nan,
            },
        ),
    )
    widths = re.findall(
        r'<td>([\w.]+)</td><td class="share"><div class="bar" style="width:(\d+)%">', found
    )
    assert widths == [("optim.lr", "75"), ("model.widths", "25")]


def test_texts_that_begin_alike_can_be_told_apart_when_shortened():
    assert [shortened(f"organisation/model-{n}", 8) for n in (4, 22)] == ["orga…l-4", "orga…-22"]
    assert shortened("short", 5) == "short"
    assert shortened("too long", 0) == "t…g"


def test_values_are_written_as_in_an_override():
    values = [None, True, [64, [1.5, "x"]], 3e-05, "text", 7, (1,)]
    assert [written(value) for value in values] == [
        "null",
        "true",
        "[64,[1.5,x]]",
        "3e-05",
        "text",
        "7",
        "[1]",
    ]
    assert [is_number(value) for value in (1, 0.5, True, math.nan, math.inf, "1", None)] == [
        True,
        True,
        *[False] * 5,
    ]
