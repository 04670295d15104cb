"""Ways through time: every sample once, chunks in the order of their recording, the same plan for
the same epoch.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.plans import real_rows

from flatout import CellsConfig
from flatout.data import SequenceData
from flatout.data.batches.plan import PlanSettings, StreamPlan
from flatout.data.sequences.views import Cut, Segments

recordings = st.lists(st.integers(1, 60), min_size=1, max_size=30)
places = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3))


def segments_of(lengths: list[int]) -> Segments:
    stops = np.cumsum(lengths)
    starts = stops - np.array(lengths)
    return Segments(starts, starts, stops, np.arange(len(lengths)))


def plans_of(
    lengths: list[int], size: int, settings: tuple[int, int, int], epoch: int = 0
) -> list[StreamPlan]:
    """The plan of each rank."""
    rows, world, accumulate = settings
    view = Cut(chunk=size).rows(segments_of(lengths))
    each = [
        PlanSettings(rows_per_batch=rows, world=world, rank=r, accumulate=accumulate, seed=4)
        for r in range(world)
    ]
    return [StreamPlan(view.length, view.recording, settings, epoch) for settings in each]


@given(recordings, st.integers(1, 20), places)
def test_each_chunk_is_in_one_batch_of_one_rank_and_follows_the_one_before(lengths, size, settings):
    plans = plans_of(lengths, size, settings)
    view = Cut(chunk=size).rows(segments_of(lengths))
    seen: dict[int, tuple[int, int]] = {}
    for rank, plan in enumerate(plans):
        for number, rows in enumerate(real_rows(plan)):
            assert len(rows) <= settings[0]
            for row in rows:
                assert row not in seen
                seen[row] = rank, number
    assert sorted(seen) == list(range(len(view.start)))
    for row in range(1, len(view.start)):
        if view.recording[row] == view.recording[row - 1]:
            (rank, number) = seen[row]
            (rank_before, before) = seen[row - 1]
            assert rank == rank_before
            assert number == before + 1


@given(recordings, st.integers(1, 20), places)
def test_ranks_and_epochs_have_as_many_batches_and_agree_on_the_rows_of_each_step(
    lengths, size, settings
):
    plans = plans_of(lengths, size, settings)
    assert {plan.num_batches for plan in [*plans, *plans_of(lengths, size, settings, epoch=5)]} == {
        plans[0].num_batches
    }
    found = [plan.batches(0, plan.num_batches) for plan in plans]
    of_steps = [each.num_real.reshape(-1, settings[2]).sum(axis=1) for each in found]
    for each in found:
        assert (each.step_rows.reshape(-1, settings[2]) == sum(of_steps)[:, None]).all()
        assert each.ends_step.reshape(-1, settings[2])[:, -1].all()


@given(recordings, st.integers(1, 20), places, st.data())
def test_a_plan_begun_in_the_middle_gives_the_rest(lengths, size, settings, data):
    plan = plans_of(lengths, size, settings)[0]
    start = data.draw(st.integers(0, plan.num_batches))
    rest = plan.batches(start, plan.num_batches)
    whole = plan.batches(0, plan.num_batches)
    np.testing.assert_array_equal(rest.rows, whole.rows[whole.bounds[start] :])
    np.testing.assert_array_equal(rest.num_real, whole.num_real[start:])


def test_epochs_differ_and_the_same_epoch_is_the_same():
    lengths = list(range(10, 40))
    first, again, other = (
        plans_of(lengths, 7, (4, 1, 1), epoch)[0].order.tolist() for epoch in (0, 0, 1)
    )
    assert first == again != other


@given(recordings, st.integers(1, 12), st.integers(1, 4))
def test_windows_of_an_estimate_end_at_each_sample_and_stay_in_their_recording(
    lengths, lookback, stride
):
    segments = segments_of(lengths)
    rows = Cut(lookback, stride=stride).rows(segments)
    ends = rows.start + rows.length - 1
    expected = [
        end
        for start, stop in zip(segments.start, segments.stop, strict=True)
        for end in range(start, stop, stride)
    ]
    assert ends.tolist() == expected
    assert (rows.start >= segments.start[rows.recording]).all()
    assert (rows.length == np.minimum(lookback, ends + 1 - segments.start[rows.recording])).all()


@given(recordings, st.integers(1, 12), st.integers(1, 6), st.integers(0, 9))
def test_forecasts_answer_their_own_split_and_read_what_is_before(
    lengths, lookback, horizon, before
):
    whole = segments_of(lengths)
    segments = Segments(
        whole.start, np.minimum(whole.start + before, whole.stop), whole.stop, whole.recording
    )
    rows = Cut(lookback, horizon).rows(segments)
    expected = [
        (first - lookback, recording)
        for recording, (start, own, stop) in enumerate(
            zip(whole.start, segments.first, whole.stop, strict=True)
        )
        for first in range(max(own, start + lookback), stop - horizon + 1)
    ]
    assert list(zip(rows.start.tolist(), rows.recording.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"lookback": 9},
        {"chunk": 13},
    ],
)
def test_each_sample_is_read_once_an_epoch_and_a_restored_feed_gives_the_rest(way):
    made = [
        SequenceData(sample=CellsConfig(cells=3, cycles=2, samples=40), batch_size=4, seed=2, **way)
        for _ in range(3)
    ]
    whole, begun, resumed = made
    for data in made:
        data.setup()
    batches = list(whole.train_dataloader())
    rows = whole.info.rows_of("train")
    ends = [
        int(rows.offsets[row] + rows.lengths[row])
        for batch in batches
        for row in batch.rows[: batch.num_real]
    ]
    expected = rows.offsets + rows.lengths
    assert sorted(ends) == sorted(expected.tolist())
    taken = list(itertools.islice(begun.train_dataloader(), 1))
    resumed.load_state_dict(begun.state_dict())
    rest = [batch.rows.tolist() for batch in resumed.train_dataloader()]
    assert [batch.rows.tolist() for batch in taken] + rest == [
        batch.rows.tolist() for batch in batches
    ]


def test_a_batch_holds_the_samples_of_its_rows():
    for way in (
        {},
        {"lookback": 9},
        {"chunk": 13},
        {"problem": "forecast", "lookback": 9, "horizon": 2},
    ):
        data = SequenceData(sample=CellsConfig(cells=3, cycles=2, samples=40), batch_size=4, **way)
        data.setup()
        column = data.info.rows_of("train")
        for batch in data.train_dataloader():
            for place, row in enumerate(batch.rows.tolist()):
                start = int(column.offsets[row])
                expected = column.values[start : start + int(column.lengths[row])]
                found = batch.tokens[batch.offsets[place] : batch.offsets[place + 1]].numpy()
                np.testing.assert_array_equal(found, expected)
