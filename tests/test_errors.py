"""A setting is described once, in its field: its words, its range and its check agree."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields
from enum import StrEnum

import pytest

from flatout.callbacks.loggers import LOGGERS
from flatout.cli.composing import COMPONENTS
from flatout.config import RunConfig
from flatout.errors import (
    LARGEST_SEED,
    About,
    OtherRankEnded,
    UserError,
    about_settings,
    check_settings,
    setting,
)


class Way(StrEnum):
    up = "up"
    down = "down"


@dataclass(kw_only=True, slots=True)
class Parts:
    """Settings of each sort."""

    way: Way = setting(Way.up, "Where to.")
    other: Way | None = setting(None, "Where to, then.", choices=Way)
    rows: int = setting(4, "Rows.", least=1, most=1000)
    rate: float | None = setting(None, "A rate.", above=0, below=0.5, hint="Take half.")
    widths: list[int] = setting(lambda: [8], "Widths.", least=1)
    weights: dict[str, float] = setting(dict, "Weights by name.", least=0)

    def __post_init__(self) -> None:
        check_settings(self, "part")


@pytest.mark.parametrize(
    ("bounds", "words", "inside", "outside"),
    [
        ({"least": 1}, "1 or more", (1, 9), (0, float("nan"), float("inf"))),
        ({"above": 0}, "above 0", (1e-9,), (0, -1)),
        ({"least": 0, "below": 1}, "0 to below 1", (0, 0.9), (1, -0.1)),
        ({"above": 0, "below": 0.5}, "above 0 and below 0.5", (0.1,), (0, 0.5)),
        ({"above": 0, "most": 1}, "above 0, at most 1", (1,), (0, 1.1)),
        (
            {"least": 0, "most": LARGEST_SEED},
            "0 to 2**63 - 1",
            (0, LARGEST_SEED),
            (-1, LARGEST_SEED + 1),
        ),
        ({}, "", (-5,), (float("nan"),)),
    ],
)
def test_the_words_of_a_range_say_what_it_holds(bounds, words, inside, outside):
    about = About(does="", **bounds)
    assert about.range == words
    assert all(map(about.holds, inside))
    assert not any(map(about.holds, outside))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"way": "upp"}, r"part.way: 'upp' \(up, down\). Did you mean 'up'\?"),
        ({"way": None}, r"part.way: None \(up, down\)"),
        ({"other": "left"}, r"part.other: 'left' \(up, down\)"),
        ({"rows": 0}, r"part.rows: 0 \(1 to 1,000\)"),
        ({"rate": 0.5}, r"part.rate: 0.5 \(above 0 and below 0.5, or null\). Take half."),
        ({"widths": [8, 0]}, r"part.widths: \[8, 0\] \(1 or more\)"),
        ({"weights": {"a": 1.0, "b": -1.0}}, r"part.weights.b: -1.0 \(0 or more\)"),
    ],
)
def test_a_value_that_its_field_does_not_allow_is_refused_in_one_sentence(given, message):
    with pytest.raises(UserError, match=f"^{message}"):
        Parts(**given)


def test_choices_become_members_and_defaults_are_nobody_elses():
    one = Parts(way="down", other="up", rate=None)
    other = Parts()
    assert (one.way, one.other) == (Way.down, Way.up)
    one.widths.append(0), one.weights.update(a=-1)
    assert (other.widths, other.weights) == ([8], {})


@pytest.mark.parametrize(
    "kind", [RunConfig, *(each for group in COMPONENTS.values() for each in group.values())]
)
def test_every_field_of_every_config_says_what_it_does(kind):
    assert [each.name for each in fields(kind) if each.name not in about_settings(kind)] == []


def test_every_logger_says_what_its_settings_do():
    for kind in LOGGERS.values():
        assert about_settings(kind).keys() == {each.name for each in fields(kind)}


@pytest.mark.parametrize("kind", [UserError, OtherRankEnded])
def test_a_mistake_found_in_another_process_is_the_same_here(kind):
    mistake = kind(
        "data.text", "no column 'txt'", allowed="text, label", hint="Did you mean 'text'?"
    )
    found = pickle.loads(pickle.dumps(mistake))
    assert (type(found), str(found), found.parts) == (kind, str(mistake), mistake.parts)
