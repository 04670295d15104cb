"""A step of a small model asks a GPU for no more operators than the ceilings of `bench operators`.

A ceiling is lowered when a step gets leaner, and never raised.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import stretches
from benchmarks.operators import CASES, MOST, PHASES, count_all

from tests.warm import begin_function

NAME_OF_COUNTS = "counts.json"


def write_counts(folder: Path) -> None:
    (folder / NAME_OF_COUNTS).write_text(json.dumps(count_all()), encoding="utf-8")


def write_counts_of_stretches(folder: Path) -> None:
    found = stretches.count_stretches()
    (folder / NAME_OF_COUNTS).write_text(json.dumps(found), encoding="utf-8")


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """The operators of all models, counted in one process, where the device is added."""
    folder = tmp_path_factory.mktemp("operators")
    command = begin_function(write_counts, folder, FLATOUT_CACHE=str(folder / "cache"))
    said, _ = command.communicate(timeout=120)
    assert command.returncode == 0, said
    counts: dict[str, dict[str, float]] = json.loads((folder / NAME_OF_COUNTS).read_text("utf-8"))
    return counts


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_no_more_operators_than_its_ceilings(name, counts):
    assert list(counts[name]) == list(PHASES)
    for phase, most in zip(PHASES, MOST[name], strict=True):
        assert counts[name][phase] <= most, phase


@pytest.mark.parametrize("name", CASES)
def test_each_phase_of_a_step_is_counted(name, counts):
    assert min(counts[name].values()) > 0


@pytest.mark.soak(seconds=30)
def test_a_step_of_a_stretch_asks_for_less_than_one_operator_beside_its_replay(tmp_path):
    command = begin_function(
        write_counts_of_stretches, tmp_path, FLATOUT_CACHE=str(tmp_path / "cache")
    )
    said, _ = command.communicate(timeout=300)
    assert command.returncode == 0, said
    found = json.loads((tmp_path / NAME_OF_COUNTS).read_text("utf-8"))
    assert list(found) == list(stretches.CASES)
    for name, counts in found.items():
        assert counts["share at once"] == 0.98, name
        assert 0 < counts["operators"] <= stretches.MOST_OPERATORS, name
        assert 0 < counts["calls"] <= stretches.MOST_CALLS[name], name
