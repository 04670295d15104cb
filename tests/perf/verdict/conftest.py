"""Runs of seconds whose verdicts race what runs of hours would."""

from __future__ import annotations

import pytest

from flatout.perf.verdict import (
    compiled_step,
    experiments,
    loop_race,
    own_tries,
    own_ways,
    ways,
)


@pytest.fixture
def long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs are long enough to race, in few rounds, whatever else this machine does."""
    monkeypatch.setattr(experiments, "SHARE", 1000.0)
    monkeypatch.setattr(own_tries, "starved", lambda evidence: None)
    monkeypatch.setattr(ways, "FREE_BYTES", 0)
    for name, value in {
        "ROWS_AROUND": 16,
        "_CALM_S": 0.05,
        "MOST_ROUNDS": 5,
        "_FED_S": 0.02,
    }.items():
        monkeypatch.setattr(experiments, name, value)
    for name, number in {"MOST_ROUNDS": 5, "_LOOP_MS": 1000.0}.items():
        monkeypatch.setattr(loop_race, name, number)
    monkeypatch.setattr(own_tries, "_COMPILES", 2.0)


@pytest.fixture
def everything_races(long_enough: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the split says, all ways are tried; a compiler that is quick stands for
    torch's own.
    """
    for name, value in {"_LEAST_COMPILE_S": 0.0, "_BACKEND": "eager"}.items():
        monkeypatch.setattr(compiled_step, name, value)
    monkeypatch.setattr(own_tries, "_COMPILES", 0.0)
    monkeypatch.setattr(loop_race, "MOST_ROUNDS", 2)
    monkeypatch.setattr(compiled_step, "why_not", lambda device: "")
    monkeypatch.setattr(own_ways, "LEAST_GAIN", 0.0)
    monkeypatch.setattr(experiments, "_MOSTLY_WAITS", 1.1)
