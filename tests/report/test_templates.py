"""The templates: every value escaped on every page, none missing from the wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from tests.report.pages import ParsedPage

from flatout.bits.exposure_page import page as exposure_page
from flatout.cli.compare import page as compare_page
from flatout.report.page import render_text

ROOT = Path(__file__).parents[2]
EVIL = "<script>alert(1)</script>\"'&{{ 7*7 }}"
EXPOSURE = {
    "encoding": EVIL,
    "source": EVIL,
    "records": {"train": 2000, "judged": 300},
    "conclusion": [EVIL, "second"],
    "scores": {"dice": 0.9, "exact": 0.2},
    "reconstruction": {
        "alone": {
            "at_1": 0.5,
            "at_5": 0.6,
            "at_10": 0.61,
            "wrong": 0.49,
            "without": 0.01,
        }
    },
    "methods": {EVIL: 0.9, "ridge regression": 0.8},
    "learning": [
        {"records": 64.0, "ridge": 0.5, "model": 0.6},
        {"records": 2000.0, "ridge": 0.8, "model": 0.9},
    ],
    "frequency": [
        {
            "from": 0,
            "to": 0,
            "grams": 3,
            "dice": 0.1,
        },
        {
            "from": 1,
            "to": 1,
            "grams": 9,
            "dice": 0.7,
        },
    ],
    "most": [{"gram": EVIL, "dice": 1.0, "records": 5}],
    "least": [],
}


def compared() -> str:
    return compare_page({f"runs/{EVIL}": EXPOSURE, "runs/b": EXPOSURE})


@pytest.mark.parametrize(
    "text",
    [
        exposure_page(EXPOSURE),
        compared(),
    ],
    ids=["exposure", "compare"],
)
def test_the_pages_of_encodings_run_nothing_and_need_no_network(text):
    parsed = ParsedPage(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert not {"src", "href", "onload", "onclick"} & parsed.names
    assert "http" not in text
    assert "&lt;script&gt;alert(1)" in text and "{{ 7*7 }}" in text  # a value is no template
    assert text.count("<svg") == parsed.tags.count("svg") >= 1


def test_the_exposure_page_shows_every_figure():
    text = exposure_page(EXPOSURE)
    for shown in (
        "0.900",
        "20.0%",
        "50.0%",
        "60.0%",
        "49.0%",
        "2,000 known records",
        "0.8000",
        "2-grams that leak most",
    ):
        assert shown in text
    assert "2-grams that leak least" not in text


def test_a_value_that_a_template_misses_is_our_own_mistake():
    from jinja2 import UndefinedError

    with pytest.raises(UndefinedError):
        render_text("report.html", name="x")


def test_the_wheel_has_every_template(tmp_path):
    from hatchling.builders.wheel import WheelBuilder

    (built,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    ours = {path.name for path in (ROOT / "src/flatout/report/templates").iterdir()}
    with zipfile.ZipFile(built) as wheel:
        packed = {
            name.rpartition("/")[2]
            for name in wheel.namelist()
            if name.startswith("flatout/report/templates/")
        }
    assert len(ours) >= 7
    assert packed == ours
