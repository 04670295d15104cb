"""Many captured steps in one turn of Lightning's loop leave what as many plain steps leave."""

from __future__ import annotations

from typing import Any

import pytest

from tests.elsewhere import stretches
from tests.elsewhere.test_graphs import results_of


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results_of(stretches.compare_all, tmp_path_factory.mktemp("stretches"))


def test_a_stretch_has_all_bits_of_plain_steps(results):
    found = results["alone"]
    assert found["steps"] == 24
    assert found["at_once"] > found["steps"] / 2
    assert found["has_equal_losses"] and found["has_equal_weights"]
    words = f"{found['at_once']} of them in stretches, alone: 5 at the end of one"
    assert words in found["summary"]
    assert found["asked_between"] == []


@pytest.mark.parametrize("name", stretches.OTHERS)
def test_nothing_is_asked_of_the_device_between_the_replays_of_a_stretch(name, results):
    found = results[name]
    assert found["at_once"] > 0
    assert found["asked_between"] == []
    assert found["has_equal_losses"] and found["has_equal_weights"]


def test_a_stretch_ends_where_a_validation_is_due(results):
    found = results["validated"]
    assert found["at_once"] > 0
    assert found["validated_at"] == [5, 13, 21]
    assert found["has_equal_validations"]
    assert found["has_equal_losses"] and found["has_equal_weights"]


def test_a_stretch_ends_at_the_last_step(results):
    found = results["with a last step"]
    assert found["steps"] == 14
    assert found["at_once"] > 0
    assert found["has_equal_losses"] and found["has_equal_weights"]


def test_the_transcript_of_the_device_has_replays_with_nothing_between_them(results):
    lines = results["transcript"]
    assert sum(" operators: " in line for line in lines) == 2  # captures
    alone = [line.startswith("replay of capture") for line in lines]
    behind = [line.endswith(("replay of capture 1", "replay of capture 2")) for line in lines]
    assert sum(behind) == 12 + 2  # those that count, and two of the proof
    assert sum(alone) == 5


def test_a_callback_that_hears_of_each_batch_ends_all_stretches_and_is_named(results):
    found = results["with a callback"]
    assert found["at_once"] == 0
    assert found["has_equal_losses"] and found["has_equal_weights"]
    assert f"alone: {found['replayed']} as Hears hears of each batch" in found["summary"]


def test_curves_and_checkpoints_of_stretches_are_those_of_plain_steps(results):
    found = results["with parts of flatout"]
    assert found["at_once"] >= 9
    assert found["rows"] == 6
    assert found["has_equal_rows"]
    assert found["kept"] == found["kept_of_plain"]
    assert "step-12" in found["kept"]
    assert found["has_equal_weights"]


def test_a_training_is_resumed_where_other_stretches_lie_to_the_same_bits(results):
    found = results["with parts of flatout"]
    assert found["resumed_at_once"] > 0
    assert found["has_equal_resumed_weights"]


def test_a_step_within_a_stretch_that_is_not_finite_is_left_out(results):
    found = results["broken"]
    assert found["at_once"] > 0
    assert found["skipped"] == [stretches.BROKEN]
    assert found["has_equal_losses"] and found["has_equal_weights"]


def test_steps_that_are_left_out_prove_no_replay(results):
    found = results["broken at first"]
    assert tuple(found["skipped"]) == stretches.BROKEN_FIRST
    assert f"{len(stretches.BROKEN_FIRST)} that could not be replayed" in found["summary"]
    assert found["at_once"] > 0
    assert found["has_equal_losses"] and found["has_equal_weights"]
