"""The page of a sweep: all trials shown, whatever came of them, nothing trusted, and the same in a
table.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from tests.params import at_once
from tests.report.pages import ParsedPage
from tests.run_files import read_csv

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
from flatout.report.sweep_page import SweepReport, TrialRow, write_sweep

EVIL = "<script>alert(1)</script>\"'&"
WIDTHS = ([64], [128], [256, 128])


def trial(number: int, status: str = "complete", value: float | None = None, **changes) -> TrialRow:
    value = 0.8 + number / 1000 if value is None and status != "failed" else value
    row = TrialRow(
        number=number,
        status=status,
        value=value,
        params={
            "optim.lr": 10 ** (-4 + number % 7 / 3),
            "model.widths": WIDTHS[number % 3],
            "model.tied": number % 2 > 0,
        },
        seconds=12.0,
        folder=f"trial_{number}",
        curve=[] if value is None else [(step, value - 0.1 / step) for step in range(1, 6)],
        metrics={"val/accuracy": value, "test/accuracy": value - 0.01}
        if status == "complete" and value
        else {},
    )
    return dataclasses.replace(row, **changes)


def report(*trials: TrialRow, **changes) -> SweepReport:
    values = SweepReport(
        name="news",
        command="python -m flatout sweep +experiment=news",
        metric="val/accuracy",
        mode="max",
        space={
            "optim.lr": "tag(log, interval(1e-4, 1e-2))",
            "model.widths": "choice([64],[128],[256,128])",
        },
        log_keys=frozenset({"optim.lr"}),
        trials=list(trials),
        best_overrides="python -m train optim.lr=0.003 'model.widths=[256,128]'",
        importance={"optim.lr": 0.75, "model.widths": 0.25},
        confirmed={},
        seconds=600.0,
    )
    return dataclasses.replace(values, **changes)


MIXED = [
    *map(trial, range(9)),
    trial(9, "pruned", 0.7, note="below the median at step 3"),
    trial(10, "failed", note="ValueError: no such thing", curve=[(1, math.nan)]),
    trial(11, "running", seconds=None),
]


def page(folder: Path, written_report: SweepReport) -> str:
    write_sweep(folder, written_report)
    return (folder / "sweep.html").read_text(encoding="utf-8")


def test_the_page_shows_what_was_searched_and_what_came_of_it(tmp_path):
    found = page(tmp_path, report(*MIXED))
    for shown in (
        "9 complete, 1 pruned, 1 failed, 1 running",
        "10 min in all",
        "highest val/accuracy",
        "<pre>python -m train optim.lr=0.003 &#39;model.widths=[256,128]&#39;</pre>",
        "tag(log, interval(1e-4, 1e-2))",
        "<b>0.8080</b>val/accuracy <small>trial 8</small>",
        "<b>0.7980</b>test/accuracy",
        "75%",
        "below the median at step 3",
        "ValueError: no such thing",
    ):
        assert shown in found
    heads = re.findall("<h2>(.*?)</h2>", found)
    assert heads == [
        "The best setting",
        "What mattered",
        "Trials",
        "Each parameter",
        "All trials",
    ]


def test_the_page_needs_no_network_and_runs_nothing(tmp_path):
    tags = ParsedPage(page(tmp_path, report(*MIXED)))
    assert tags.links == []
    assert not {"script", "link", "img", "iframe"} & set(tags.tags)


def test_trials_that_have_left_a_report_are_linked_and_no_others(tmp_path):
    sweep, outside = tmp_path / "sweep", tmp_path / "outside"
    for folder in (sweep / "0", sweep / "a b#1", outside):
        folder.mkdir(parents=True)
        (folder / "report.html").write_text("its own")
    (sweep / "1").mkdir()
    (sweep / "link").symlink_to(outside)
    folders = ["0", "1", "a b#1", "../outside", "link", str(outside), ""]
    found = page(
        sweep, report(*(trial(number, folder=name) for number, name in enumerate(folders)))
    )
    links = ParsedPage(found).links
    assert sorted(links) == ["./0/report.html", "./a%20b%231/report.html"]
    assert all((sweep / unquote(link)).read_text() == "its own" for link in links)
    assert f"<td>{outside}</td>" in found and "<td>1</td>" in found


def test_nothing_that_is_written_by_others_becomes_markup(tmp_path):
    rows_of_evil = [
        trial(
            n,
            params={EVIL: f"{EVIL}{n % 2}"},
            note=EVIL,
            folder=EVIL,
            metrics={f"test/{EVIL}": 0.5},
        )
        for n in range(4)
    ]
    evil = report(
        *rows_of_evil,
        trial(4, EVIL),
        name=EVIL,
        command=EVIL,
        metric=EVIL,
        space={EVIL: EVIL},
        best_overrides=EVIL,
        importance={EVIL: 1.0},
        confirmed={1: {EVIL: 0.5}},
    )
    found = page(tmp_path, evil)
    assert "<script" not in found
    assert "&lt;script&gt;" in found
    assert "script" not in ParsedPage(found).tags


def test_values_no_font_or_file_can_hold_are_shown_as_escape_codes(tmp_path):
    odd = "a\x00b\n\u2028\ud800 日本"
    trials = [trial(n, params={odd: f"{odd}{n % 2}", "b": n}, note=odd) for n in range(4)]
    found = page(tmp_path, report(*trials, importance={odd: 1.0}))
    assert found.count(r"a\x00b\n\u2028\ud800 日本") >= 3  # bar, axis and ticks
    for svg in re.findall("<svg.*?</svg>", found):
        ElementTree.fromstring(svg)


@pytest.mark.parametrize(
    "trials",
    [
        [],
        [trial(0)],
        [trial(0), trial(1)],
        [
            trial(0, value=math.nan),
            trial(1, value=math.inf),
            trial(2, "complete", seconds=math.nan),
        ],
        [trial(3, "failed"), trial(4, "pruned"), trial(5, "running", seconds=None)],
        [trial(n, value=0.5, params={"a": 1}) for n in range(12)],
        [
            trial(n, value=0.5, params={"a": [None, True, 10**400, math.nan, 0.5, "x"][n]})
            for n in range(6)
        ],
        [trial(n, params={"optim.lr": 0.0 if n else -1.0}) for n in range(3)],
        [trial(n, params={} if n % 2 else {"optim.lr": 0.1 * n}) for n in range(7)],
        [trial(n, value=1e18 + n * 1e3) for n in range(3)] + [trial(3, value=1e-13)],
        [trial(n, value=n * 1e-14, curve=[(n, 1e250)]) for n in range(20)],
    ],
    ids=[
        "none",
        "one",
        "two",
        "not finite",
        "none complete",
        "all alike",
        "mixed",
        "log of 0",
        "gaps",
        "huge",
        "tiny",
    ],
)
@pytest.mark.parametrize("mode", at_once("max", of=["max", "min"], seconds=1))
def test_it_holds_whatever_came_of_the_trials(tmp_path, trials, mode):
    found = page(tmp_path, report(*trials, mode=mode, importance={}, best_overrides=""))
    places = ParsedPage(found).places
    assert all(-20 <= place <= 949 for place in places)
    assert len(read_csv(tmp_path / "sweep.csv")) == len(trials)


@pytest.mark.soak(seconds=2)
def test_five_hundred_trials_of_twelve_parameters_and_long_texts_stay_within_their_charts(tmp_path):
    keys = [f"some.group.{'long_' * 10}{i}" for i in range(12)]
    many = [
        trial(
            n,
            params={
                key: n * i if i % 2 else f"{'word ' * 200}{n % (i + 1)}"
                for i, key in enumerate(keys)
            },
        )
        for n in range(500)
    ]
    found = page(tmp_path, report(*many, importance=dict.fromkeys(keys, 1 / 12)))
    assert len(found) < 5e6
    assert all(-20 <= place <= 949 for place in ParsedPage(found).places)
    assert found.count("<title>trial ") > 12 * 500


def test_a_report_without_a_complete_trial_says_so_and_names_no_best(tmp_path):
    found = page(
        tmp_path, report(trial(1, "pruned"), trial(2, "failed"), best_overrides="", importance={})
    )
    assert "No trial is complete" in found
    assert "<pre>" not in found
    assert "What mattered" not in found
    assert 'class="best"' not in found


def test_trials_are_listed_best_first_and_those_without_a_result_last(tmp_path):
    trials = [
        trial(0, "failed"),
        trial(1, "pruned", 0.9),
        trial(2, value=0.5),
        trial(3, value=math.nan),
        trial(4, value=0.7),
        trial(5, "running"),
    ]
    order = {"max": [4, 2, 3, 1, 0, 5], "min": [2, 4, 3, 1, 0, 5]}
    for mode, numbers in order.items():
        found = page(tmp_path, report(*trials, mode=mode))
        assert [
            int(n) for n in re.findall(r'<tr class="\w*"><td class="n">(\d+)', found)
        ] == numbers
        assert re.findall(r'<tr class="best"><td class="n">(\d+)', found) == [str(numbers[0])]


def test_runs_with_other_seeds_stand_beside_what_the_search_found(tmp_path):
    confirmed = {seed: {"val/accuracy": 0.8 + seed / 100} for seed in (1, 2, 3)}
    confirmed[4] = {"val/accuracy": math.nan, "test/f1": 0.5}
    found = page(tmp_path, report(trial(0, value=0.9), confirmed=confirmed))
    assert '<td class="n">0.9000</td><td class="n">0.8200 ± 0.0100</td>' in found
    assert '<td>test/f1</td><td class="n">–</td><td class="n">0.5000</td>' in found
    assert "seed 4" in found
    assert "nan" not in found


def test_the_table_has_a_column_for_each_parameter_and_metric(tmp_path):
    write_sweep(
        tmp_path, report(trial(1), trial(2, "failed", note="why", params={"model.widths": [8, 4]}))
    )
    first, second = read_csv(tmp_path / "sweep.csv")
    assert list(first) == [
        *("number", "status", "value", "seconds"),
        *("optim.lr", "model.widths", "model.tied"),
        *("val/accuracy", "test/accuracy"),
        *("note", "folder"),
    ]
    assert (
        first["model.widths"] == "[128]"
        and first["model.tied"] == "true"
        and first["value"] == "0.801"
    )
    assert second["model.widths"] == "[8,4]" and second["optim.lr"] == "" and second["value"] == ""
    assert (second["note"], second["folder"]) == ("why", "trial_2")


def test_a_spreadsheet_runs_no_cell_of_the_table_and_keeps_its_numbers(tmp_path):
    params = {
        "+model.x": "=1+1",
        "b": "-x",
        "c": "@sum",
        "d": -0.5,
        "e": "-0.5",
        "f": "+x",
        "g": "a,b\n=c",
    }
    write_sweep(
        tmp_path, report(trial(0, value=-1.5, params=params, note="-1+cmd|' /C calc'!A0"), space={})
    )
    (row,) = read_csv(tmp_path / "sweep.csv")
    assert row["'+model.x"] == "'=1+1"
    assert [row[key] for key in "bcdefg"] == ["'-x", "'@sum", "-0.5", "-0.5", "'+x", "a,b\n=c"]
    assert row["value"] == "-1.5"
    assert row["note"] == "'-1+cmd|' /C calc'!A0"


def test_a_report_is_replaced_in_one_step_and_leaves_nothing_beside_it(tmp_path):
    page(tmp_path, report(trial(0), name="before"))
    found = page(tmp_path, report(trial(0), name="after", command="half a character: \ud800"))
    assert "after" in found and "before" not in found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep.csv", "sweep.html"]


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
    assert best_so_far(dots, "min") == [(0, 3.0), (1, 1.0), (2, 1.0), (3, 0.0)]
    assert best_so_far(dots[::-1], "max") == [(0, 3.0), (1, 3.0), (2, 3.0), (3, 3.0)]


def test_each_trial_is_a_dot_at_its_value_that_names_it():
    values = {4: 0.5, 5: 1.0, 6: 0.0, 7: 0.25}
    dots = [
        Dot(number, "best" if y == 1 else "complete", number, y) for number, y in values.items()
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
    ends = [(0, "best", 100, 0.9), (1, "pruned", 50, 0.2), (2, "complete", 100, 0.5)]
    lines = [[Dot(number, kind, 0, 0.1), Dot(number, kind, x, y)] for number, kind, x, y in ends]
    chart = learning_chart(lines, metric="val/accuracy", mode="max")
    assert names(chart, "path") == ["trial 1", "trial 2", "trial 0"]
    (left, _), *_ = points(marks(chart, "path")[0])
    ends = [points(mark)[-1][0] for mark in marks(chart, "path")]
    assert ends[0] == pytest.approx((ends[1] + left) / 2, abs=1)
    assert learning_chart([[]], metric="x", mode="max") is None


def test_a_long_curve_is_thinned_and_keeps_its_end():
    line = [Dot(0, "complete", n, n) for n in range(10_001)]
    assert len(thin(line)) <= 102 and thin(line)[-1] == line[-1]
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
    "values", [[3.0], [0.0], [1e20, 1e20], [5e-11, 6e-11], [1.0, 1.0 + 1e-9], [-4.0, 9.0], [1e299]]
)
def test_an_axis_holds_its_values_and_has_ticks_that_differ(values):
    scale = number_scale(values)
    assert scale.low < scale.high
    assert all(scale.clip(value) == pytest.approx(value) for value in values) and not far_worse(
        scale, values
    )
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
    assert 0.1 < scale.low <= 0.9 and scale.clip(0.1) == scale.low
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
        report(*MIXED, importance={"model.widths": 0.25, "optim.lr": 0.75, "model.tied": math.nan}),
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
