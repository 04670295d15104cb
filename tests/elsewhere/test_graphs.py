"""Captured steps have the bits of plain ones, and what a capture could get wrong is found.

The device elsewhere captures as a CUDA graph does (`capture.py`); no time is measured on it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from flatout.models import MODELS
from tests.elsewhere import graphs
from tests.params import at_once
from tests.warm import begin_function

# One process trains the cases once; `found` asks late for their fixture, which hides its scope.
pytestmark = pytest.mark.xdist_group("graphs")
REASONS = {
    "an optimizer that is not fused": "does not step on the device alone",
    "deberta": "which activations are computed again",
    "a network of one's own": "CountsItsPasses is no network of flatout's",
}
"""Cases that no graph takes, with the words that say why."""
ALONE = {
    "bits": "as rows have several labels",
    "bits without recombined texts": "as rows have several labels",
    "largest of windows": "as a step reads where texts are cut",
    "masked words": "as a step reads the numbers of its rows",
    "means of windows": "as a step reads where texts are cut",
    "recordings of any length": "as a step reads the numbers of its rows",
    "rnn with a carried state": "as a step reads the numbers of its rows",
    "several labels": "as rows have several labels",
}
"""Cases whose replays are in no stretch, with the words that say why."""


KEEP_TENSORS = {
    "batches/kept_tensors.py": "kept for ever",
    "batches/flat_batch.py": "shifts of bits, kept for ever",
    "encoder/relative.py": "rows of distances, also earlier ones",
    "bits/task.py": "grams of recombined texts, which no step changes",
    "tasks/sequences.py": "sizes of noise and rows to be continued, copied once",
}
"""Files that read tensors which lie outside of a step, and why these do not move."""


def results_of(function: Any, folder: Any) -> dict[str, Any]:
    command = begin_function(function, folder, FLATOUT_CACHE=str(folder / "cache"))
    said, _ = command.communicate(timeout=400)
    assert command.returncode == 0, said
    found: dict[str, Any] = json.loads((folder / graphs.RESULTS).read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case gives; all train in one process, where the device is added."""
    return results_of(graphs.compare_some, tmp_path_factory.mktemp("some"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of(graphs.compare_others, tmp_path_factory.mktemp("others"))


@pytest.fixture
def found(name: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the case of a test gives."""
    results = request.getfixturevalue("others" if name in graphs.IN_SOAK else "some")
    of_case: dict[str, Any] = results[name]
    return of_case


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of(graphs.plant_all, tmp_path_factory.mktemp("planted"))


REPLAYED = sorted(set(graphs.CASES) - set(REASONS))
REPLAYED_AT_ONCE = at_once(*(set(REPLAYED) - set(graphs.IN_SOAK)), of=REPLAYED, seconds=6)


@pytest.mark.parametrize("name", REPLAYED_AT_ONCE)
def test_replayed_steps_have_all_bits_of_plain_ones(name, found):
    assert "error" not in found, found["error"]
    # The first step of each shape is plain, and so is the last batch of an epoch with other rows.
    assert found["replayed"] >= found["steps"] / 3, found["summary"]
    assert found["replayed_of_plain"] == 0
    assert found["has_equal_weights"] and found["has_equal_losses"]
    assert found["different_losses"] > found["steps"] / 2
    assert (found["at_once"] == 0) == (name in ALONE)
    assert ALONE.get(name, "in stretches") in found["summary"]
    assert ("captured again behind 2 thaws" in found["summary"]) == ("thaws" in name)


def test_each_model_of_the_settings_is_among_the_cases():
    networks = {type(case.make(1)[1].model_config) for case in graphs.CASES.values()}
    assert set(MODELS.values()) <= networks


@pytest.mark.parametrize("name", REPLAYED_AT_ONCE)
def test_two_captures_of_a_shape_have_the_same_plain_numbers(name, found):
    assert found["captured_twice"] > 0
    assert found["baked"] == []
    assert {line.partition(":")[0] for line in found["outside"]} <= set(KEEP_TENSORS)


def test_a_plain_number_that_a_capture_has_baked_is_named_by_its_line(planted):
    of_network = planted["a baked count"]
    words = "gets another plain number in each step at"
    assert of_network["baked"][0] == f"div {words} {of_network['line']}"
    assert of_network["line_before"] in of_network["outside"]
    assert f"_fused_adamw_ {words} engine/fused_adamw.py:" in planted["a baked rate"]["baked"][0]


def test_a_training_is_resumed_amid_replays_to_the_same_bits(tmp_path):
    results = results_of(graphs.resume_all, tmp_path)
    assert list(results) == list(graphs.RESUMED)
    for name, found in results.items():
        assert found["steps"] == found["steps_of_whole"] > graphs.CUT_AT, name
        assert found["losses"] > found["steps"] - graphs.CUT_AT, name
        assert found["replays_before_cut"] > 3, name  # those of the proof
        assert found["replayed"] > 0, name
        assert found["has_equal_losses"] and found["has_equal_weights"], name


def test_a_run_whose_steps_the_host_decides_is_refused_before_it_trains(tmp_path):
    command = begin_function(graphs.run_on_host, tmp_path, FLATOUT_CACHE=str(tmp_path / "cache"))
    said, _ = command.communicate(timeout=120)
    assert command.returncode == 2, said
    refusal = "graph: on, but the host decides in each step which activations are computed again."
    assert said.splitlines()[-1] == f"{refusal} Leave it at auto."
    assert "Traceback" not in said
    assert not list(tmp_path.rglob("checkpoints/*"))


@pytest.mark.parametrize("name", REASONS)
def test_a_step_that_cannot_be_captured_is_refused_with_the_reason(name, found):
    assert REASONS[name] in found["said"]


@pytest.mark.parametrize("name", ["a baked rate", "old offsets"])
def test_numbers_of_the_captured_step_that_stay_are_found(name, planted):
    assert not planted[name]["has_equal_losses"]


def test_a_replay_that_gives_other_numbers_ends_the_replays(planted):
    found = planted["repeated random numbers"]
    assert found["replayed"] == 0
    assert found["has_equal_losses"]  # the trial has left nothing behind
    assert "a replay gives other numbers" in found["summary"]


def test_another_weight_or_another_group_of_the_optimizer_is_captured_anew(planted):
    found = planted["another weight"]
    assert found["has_equal_losses"]
    assert found["replayed"] == 15
    assert found["captured"] == 15


def test_a_callback_that_freezes_in_each_step_is_not_taken_for_thaws(planted):
    found = planted["a weight frozen in turn"]
    assert found["steps"] == 24
    assert found["summary"] == "off, another value of the trained weights in each step"


def test_a_step_that_reads_the_device_stays_plain_with_the_reason(planted):
    found = planted["a read of the device"]
    assert found["replayed"] == 0
    assert "its capture failed (_local_scalar_dense while capturing" in found["summary"]


@pytest.mark.parametrize("name", ["an event of a clock", "page-locked memory", "the random state"])
def test_a_step_that_asks_for_what_no_capture_may_stays_plain_with_the_reason(name, planted):
    found = planted[name]
    assert found["replayed"] == 0
    assert found["steps"] == 24
    assert found["has_equal_losses"]
    reason = "page-locked memory, the random state or an event is asked for while capturing"
    assert f"its capture failed ({reason}" in found["summary"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("on: no memory", "its capture failed (CUDA out of memory. Tried to allocate 2 GiB)"),
        ("on: repeated random numbers", "a replay gives other numbers, by up to"),
        ("on: a read of the device", "its capture failed (_local_scalar_dense while capturing"),
    ],
)
def test_graph_on_is_refused_where_the_first_step_cannot_be_replayed(name, reason, planted):
    found = planted[name]
    assert not found["has_trained"]
    assert found["refusal"].startswith(f"graph: on, but {reason}")
    assert found["refusal"].endswith("Leave it at auto.")


def test_a_run_with_graph_on_and_no_memory_for_it_ends_in_one_sentence(tmp_path):
    function = graphs.run_without_memory
    command = begin_function(function, tmp_path, FLATOUT_CACHE=str(tmp_path / "cache"))
    said, _ = command.communicate(timeout=120)
    assert command.returncode == 2, said
    refusal = "graph: on, but its capture failed (CUDA out of memory. Tried to allocate 2 GiB)."
    assert said.splitlines()[-1] == f"{refusal} Leave it at auto."
    assert "Traceback" not in said


def test_steps_that_are_not_counted_are_found(planted):
    assert planted["a forgotten counter"]["steps"] < 24


def test_a_capture_without_memory_leaves_no_trace_and_its_shape_trains_plainly(planted):
    found = planted["no memory for a capture"]
    assert found["has_equal_losses"]
    assert found["steps"] == 24
    assert 0 < found["replayed"] <= 3
    assert "of a shape that is not captured" in found["summary"]
