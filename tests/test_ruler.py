"""The figures of `tests/ruler.py` stay below their ceilings, in the package and in the tests.

A figure that fails names its places. A ceiling is lowered when the tree gets better, and never
raised: write one statement a line, give the middle value of a nested expression a name, type a
parameter by the class or the `Protocol` that it takes, and call a variable what it holds.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.ruler import TreeFigures, measure_tree, repeated_class_names

pytestmark = pytest.mark.xdist_group("ruler")  # one process measures each tree once
ROOT = Path(__file__).parents[1]
MOST_TOKENS_A_LINE = {"src": 8.9, "tests": 9.0}
MOST_PLACES = {
    "src": {
        "packed": 0,
        "nested": 1,
        "walrus": 0,
        "long lines": 0,
        "wide functions": 20,
        "Any parameters": 18,
        "getattr with a default": 43,
        "vars": 18,
        "vague names": 12,
    },
    "tests": {
        "packed": 0,
        "nested": 1,
        "long lines": 0,
    },
}
LEAST_COMMENTS = 28
"""Lines of the package, of a thousand, that are comments."""


@cache
def figures_of(folder: str) -> TreeFigures:
    return measure_tree(ROOT / folder)


@pytest.mark.parametrize("folder", MOST_TOKENS_A_LINE)
def test_a_line_of_code_holds_few_tokens(folder):
    assert figures_of(folder).tokens_a_line <= MOST_TOKENS_A_LINE[folder]


@pytest.mark.parametrize(
    ("folder", "figure"),
    [(folder, figure) for folder, most in MOST_PLACES.items() for figure in most],
)
def test_a_figure_of_the_ruler_stays_below_its_ceiling(folder, figure):
    figures = figures_of(folder)
    places = figures.places.get(figure, [])
    assert len(places) <= MOST_PLACES[folder][figure], "\n".join(places[:40])


def test_comments_stand_at_paragraphs():
    assert figures_of("src").per_thousand_lines("comments") >= LEAST_COMMENTS


def test_no_two_classes_of_the_package_share_a_name():
    assert repeated_class_names(ROOT / "src") == {}


def test_the_ruler_finds_what_it_counts(tmp_path):
    (tmp_path / "dense.py").write_text(
        '"""A docstring does not count."""\n'
        "# nor does a comment, but it is counted\n"
        "count, name = 0, 'x'\n"
        "a, b = b, a\n"
        "low, high = floor(x), floor(y)\n"
        "first = second = third = None\n"
        "sign = 1 if x > 0 else (0 if x == 0 else -1)\n"
        "print(size := 3)\n"
        "if (found := rows):\n"
        "    vars(found)['y'] = getattr(found, 'z', None)\n"
        "def fit(self, a: Any, b, c, d, e, f): ...\n"
        "def step(self, a, b, c, d, e): ...\n"
        + "#" * 101
        + "\ndef read(place):\n    found = place\n\n    return [each for each in place]\n",
        encoding="utf-8",
    )
    figures = measure_tree(tmp_path)
    lines = {}
    for figure, places in figures.places.items():
        lines[figure] = [int(place.rsplit(":")[-1]) for place in places]
    assert lines == {
        "packed": [3, 6],
        "nested": [7],
        "walrus": [8],
        "vars": [10],
        "getattr with a default": [10],
        "wide functions": [11],
        "Any parameters": [11],
        "long lines": [13],
        "vague names": [14],
    }
    assert figures.counts["comments"] == 2


def test_a_string_is_one_token_whatever_it_is_filled_with(tmp_path):
    (tmp_path / "said.py").write_text(
        "place = f'{a} of {sum(b):.2f}'\ntext = f'''{f'{a}'}\n{b}'''\n",
        encoding="utf-8",
    )
    counts = measure_tree(tmp_path).counts
    assert (counts["tokens"], counts["code lines"]) == (6, 3)
