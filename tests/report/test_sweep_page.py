"""The page of a sweep: all trials shown, whatever came of them, nothing trusted, and the same in a
table.
"""

from __future__ import annotations

import math
import re
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from tests.params import at_once
from tests.report.pages import ParsedPage
from tests.report.sweep_reports import EVIL, MIXED, page, report, trial
from tests.run_files import read_csv

from flatout.report.sweep_page import write_sweep


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


def test_energy_and_money_have_columns_and_charts_where_they_are_known(tmp_path):
    known = {"val/accuracy": 0.8, "kwh": 0.0123}
    shown = page(tmp_path, report(trial(0, metrics=known), trial(1, metrics=known), trial(2)))
    assert "<th>kwh</th>" in shown
    assert shown.count("0.0123") >= 2
    assert "money" not in shown
    charts = re.findall("<figcaption>(.*?) <small>", shown)
    assert "kwh" in charts
    assert "kwh" not in page(tmp_path, report(trial(0)))


def test_the_page_needs_no_network_and_runs_nothing(tmp_path):
    tags = ParsedPage(page(tmp_path, report(*MIXED)))
    assert tags.links == []
    assert not {"script", "link", "img", "iframe"} & set(tags.tags)


def test_trials_that_have_left_a_report_are_linked_and_no_others(tmp_path):
    sweep = tmp_path / "sweep"
    outside = tmp_path / "outside"
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
    assert f"<td>{outside}</td>" in found
    assert "<td>1</td>" in found


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
    many = []
    for n in range(500):
        params: dict[str, object] = {}
        for i, key in enumerate(keys):
            params[key] = n * i if i % 2 else f"{'word ' * 200}{n % (i + 1)}"
        many.append(trial(n, params=params))
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
    assert first["model.widths"] == "[128]"
    assert first["model.tied"] == "true"
    assert first["value"] == "0.801"
    assert second["model.widths"] == "[8,4]"
    assert second["optim.lr"] == ""
    assert second["value"] == ""
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
    assert "after" in found
    assert "before" not in found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep.csv", "sweep.html"]
