"""What is planted holds a run back as it should, and what a verdict says to type is typed as a person would."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from benchmarks import plants
from benchmarks.doctor import PLANTED, Diagnosed, with_override

from flatout.data.batches.feed import Feed
from flatout.data.batches.plan import PlanSettings
from flatout.data.feeding import FeedKind


@pytest.mark.parametrize(
    ("typed", "override", "fixed"),
    [
        (["data.feed=workers", "threads=2"], "data.feed=resident", ["threads=2", "data.feed=resident"]),
        (["+trainer.val_check_interval=5"], "++trainer.val_check_interval=1.0", ["++trainer.val_check_interval=1.0"]),
        (["a=1", "+callbacks.plant._target_=x.Y", "+callbacks.plant.ms=12"], "~callbacks.plant", ["a=1"]),
        (["data.batch_size=4"], "data.batch_size=32 data.accumulate=1", ["data.batch_size=32", "data.accumulate=1"]),
    ],
)
def test_an_override_takes_the_place_of_what_was_typed(typed, override, fixed):
    assert with_override(typed, override) == fixed


def test_every_plant_can_be_named_on_a_command_line():
    named = {word.rpartition(".")[2] for each in PLANTED for word in each.words if "._target_=" in word}
    assert named == {name for name, each in inspect.getmembers(plants, inspect.isclass) if is_plant(each)}


def is_plant(each: type) -> bool:
    return each.__module__ == plants.__name__ and not inspect.isabstract(each)


@pytest.fixture
def put_back() -> Iterator[None]:
    yield
    patch.stopall()


@pytest.mark.usefixtures("put_back")
def test_a_transform_that_is_planted_goes_over_training_batches_alone(make_split):
    class Counting(plants.Transforming):
        seen = 0

        def transform(self, batch):
            self.seen += 1
            return batch

    counting = Counting()
    for is_shuffled, expected in ((False, 0), (True, 4)):
        feed = Feed(make_split([3] * 8), PlanSettings(rows_per_batch=2, shuffle=is_shuffled), kind=FeedKind.resident)
        assert len(list(feed)) == 4
        assert counting.seen == expected


@pytest.mark.parametrize(
    ("told", "gain", "is_within"), [(2.0, 2.4, True), (2.0, 2.6, False), (2.0, 1.4, False), (None, 2.0, False)]
)
def test_a_mend_is_judged_by_what_came_against_what_was_told(told, gain, is_within):
    planted = PLANTED[0]
    found = Diagnosed(planted, {"cause": planted.causes[0], "sentence": ""}, told, gain, 1.0)
    assert found.is_named and found.is_within is is_within
    other = Diagnosed(planted, {"cause": "padding", "sentence": ""}, told, gain, 1.0)
    assert not other.is_named and not other.is_within
