"""The example of every setting composes, with the option that it belongs to."""

from __future__ import annotations

import shlex

import pytest

from flatout.cli.settings import SettingPage, all_settings
from tests.composed import compose_run

pytestmark = pytest.mark.soak(seconds=240)
OPTIONS = {
    "data=bits": "data=bits model=bitmlp task=grams",
    "data=sequence": "data=sequence model=rnn task=sequence",
    "task=sequence": "data=sequence model=rnn task=sequence",
    "model=rnn": "data=sequence model=rnn task=sequence",
    "model=window_mlp": "data=sequence model=window_mlp task=sequence data.lookback=8",
    "model=bitmlp": "data=bits model=bitmlp task=grams",
    "task=grams": "data=bits model=bitmlp task=grams",
    "task=mlm": "data=tweets model=transformer task=mlm",
    "task=tagging": "data=tagged_tweets model=transformer task=tagging",
    "data=cells": "data=cells model=rnn task=sequence",
    "data=tagged_tweets": "data=tagged_tweets model=transformer task=tagging",
}
"""The words that an option needs beside it; other options stand alone."""
ALONE = ("run", "trainer", "python -m train -m", "tune=default")
"""Options that are no words of a command line."""
OF_RECORDINGS = ("data.read.decimal", "data.read.dates")
"""Settings that every kind of data has, and only recordings take."""


def words_of(setting: SettingPage) -> list[str]:
    """The words of a command line that shows an example."""
    option = setting.option
    if any(key in setting.example for key in OF_RECORDINGS):
        option = "data=sequence"
    default = "" if option in ALONE else option
    before = OPTIONS.get(option, default)
    return shlex.split(f"{before} {setting.example}")


def test_every_example_composes(monkeypatch):
    monkeypatch.setenv("FLATOUT_SECRET", "quiet")
    broken = []
    for setting in all_settings():
        if setting.option == "python -m flatout sweep" or "my_package" in setting.example:
            continue
        try:
            compose_run(words_of(setting))
        except Exception as error:  # whatever Hydra or a check raises, the example is broken
            broken.append(f"{' '.join(words_of(setting))}: {error}")
    assert not broken, "\n".join(broken)
