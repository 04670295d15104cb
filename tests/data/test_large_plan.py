"""Plans by windows: the promises of a plan, in the memory of one window."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.plans import plans_of_all_ranks, real_rows
from tests.data.test_plan import lengths_of_rows

from flatout.data.batches import large_plan
from flatout.data.batches.feed import Feed
from flatout.data.batches.large_plan import LargePlan, is_large, is_sorted_by
from flatout.data.batches.plan import BatchLayout, Plan, PlanSettings, count_batches
from flatout.data.store.store import Ragged, StoreSplit
from flatout.data.texts.data import TextData

WINDOW = 32
RUN = 7
"""Rows; tiny, and a window is no whole number of runs."""


@pytest.fixture(autouse=True, scope="module")
def small_windows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_plan, "WINDOW_ROWS", WINDOW)
        patch.setattr(large_plan, "RUN_ROWS", RUN)
        yield


@st.composite
def settings_of_plans(draw: st.DrawFn) -> PlanSettings:
    return PlanSettings(
        rows_per_batch=draw(st.integers(1, 12)),
        accumulate=draw(st.integers(1, 3)),
        layout=draw(st.sampled_from(list(BatchLayout))),
        seed=draw(st.integers(0, 5)),
        world=draw(st.integers(1, 4)),
        megabatch_steps=draw(st.integers(1, 5)),
    )


@given(lengths_of_rows, settings_of_plans(), st.integers(0, 3))
def test_every_row_comes_exactly_once_an_epoch_over_all_ranks(lengths, settings, epoch):
    seen = [
        row
        for plan in plans_of_all_ranks(LargePlan, lengths, settings, epoch)
        for batch in real_rows(plan)
        for row in batch
    ]
    assert sorted(seen) == list(range(len(lengths)))


@given(lengths_of_rows, settings_of_plans())
def test_every_epoch_has_the_batches_of_a_plan_made_whole(lengths, settings):
    counts = {
        plan.num_batches
        for epoch in range(3)
        for plan in plans_of_all_ranks(LargePlan, lengths, settings, epoch)
    }
    assert counts == {count_batches(lengths, settings)} == {Plan(lengths, settings).num_batches}


@given(lengths_of_rows, settings_of_plans(), st.data())
def test_seeking_gives_the_same_batches_as_reading_from_the_start(lengths, settings, data):
    plan = LargePlan(lengths, settings)
    start = data.draw(st.integers(0, plan.num_batches - 1))
    stop = data.draw(st.integers(start + 1, plan.num_batches))
    whole = plan.batches(0, plan.num_batches)
    part = LargePlan(lengths, settings).batches(start, stop)
    assert part.rows.tolist() == whole.rows[whole.bounds[start] : whole.bounds[stop]].tolist()
    assert np.diff(part.bounds).tolist() == np.diff(whole.bounds)[start:stop].tolist()
    for name in ("num_real", "step_rows", "ends_step"):
        assert getattr(part, name).tolist() == getattr(whole, name)[start:stop].tolist()


@given(
    lengths_of_rows,
    st.sampled_from([(1, 4), (2, 2), (4, 1)]),
    st.sampled_from(list(BatchLayout)),
    st.integers(0, 3),
)
def test_a_step_holds_the_same_rows_however_it_is_divided(lengths, division, layout, epoch):
    world, accumulate = division
    whole = LargePlan(lengths, PlanSettings(rows_per_batch=8, layout=layout), epoch)
    divided = PlanSettings(rows_per_batch=2, accumulate=accumulate, world=world, layout=layout)
    plans = plans_of_all_ranks(LargePlan, lengths, divided, epoch)
    for step in range(whole.num_steps):
        rows = [
            row
            for plan in plans
            for batch in real_rows(plan, step * accumulate, (step + 1) * accumulate)
            for row in batch
        ]
        assert (
            sorted(rows)
            == sorted(whole.rows_of_step(step).tolist())
            == sorted(real_rows(whole)[step])
        )


@given(lengths_of_rows, settings_of_plans())
def test_a_window_holds_whole_steps_of_few_runs(lengths, settings):
    plan = LargePlan(lengths, settings)
    product = settings.rows_per_batch * settings.parts
    steps = max(1, WINDOW // product)
    for first in range(0, plan.num_steps, steps):
        rows = np.concatenate(
            [plan.rows_of_step(step) for step in range(first, min(first + steps, plan.num_steps))]
        )
        assert len(np.unique(rows // RUN)) <= -(-len(rows) // RUN) + 2


def test_epochs_and_windows_have_orders_of_their_own():
    lengths = np.ones(4 * WINDOW, np.int32)
    orders = [
        LargePlan(lengths, PlanSettings(rows_per_batch=WINDOW), epoch).batches(0, 4).rows
        for epoch in (0, 1, 0)
    ]
    assert orders[0].tolist() == orders[2].tolist() != orders[1].tolist()
    repeated = (
        LargePlan(lengths, PlanSettings(rows_per_batch=WINDOW, repeats=True), 3).batches(0, 4).rows
    )
    assert repeated.tolist() == orders[0].tolist()
    places = [np.argsort(np.argsort(window)).tolist() for window in orders[0].reshape(4, WINDOW)]
    assert len({tuple(place) for place in places}) == 4


def test_rows_of_one_window_and_rows_under_a_token_cap_are_planned_whole():
    assert not is_large(WINDOW, PlanSettings())
    assert is_large(WINDOW + 1, PlanSettings())
    assert not is_large(WINDOW + 1, PlanSettings(tokens_per_batch=100))
    assert not is_large(WINDOW + 1, PlanSettings(shuffle=False))


def test_classes_in_runs_of_their_own_are_found_and_mixed_ones_are_not():
    random = np.random.default_rng(0)
    mixed = random.integers(0, 5, 500).astype(np.int32)
    assert is_sorted_by(np.sort(mixed))
    assert not is_sorted_by(mixed)
    assert not is_sorted_by(np.zeros(500, np.int32))


@pytest.mark.parametrize("order", ["sorted", "mixed"])
def test_a_source_sorted_by_label_is_told_where_it_is_too_large_to_be_shuffled_at_once(
    order, tmp_path, capfd
):
    rows = [f"w{number * 7 % 50} of {number},{'ab'[number % 2]}" for number in range(200)]
    rows = sorted(rows, key=lambda row: row[-1]) if order == "sorted" else rows
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows, ""]), encoding="utf-8")
    data = TextData(source=str(tmp_path / "rows.csv"), cache=str(tmp_path / "cache"))
    data.setup()
    rows = [row for batch in data.train_dataloader() for row in batch.rows.tolist()]
    assert sorted(rows) == list(range(data.store.splits["train"].num_rows))
    assert ("the source is sorted by label" in capfd.readouterr().out) is (order == "sorted")


def test_a_feed_of_windows_continues_where_it_was():
    lengths = np.arange(1, 101, dtype=np.int32) % 9 + 1
    split = StoreSplit(
        "train", 100, {"tokens": Ragged.of(np.arange(lengths.sum(), dtype=np.int32), lengths)}
    )

    def feed() -> Feed:
        return Feed(split, PlanSettings(rows_per_batch=6, accumulate=2))

    assert is_large(100, feed().plan)
    whole = [batch.rows.tolist() for batch in feed()]
    assert sorted(row for rows in whole for row in rows) == list(range(100))
    broken = feed()
    position = 7
    for _, batch in zip(range(position), broken, strict=False):
        assert (
            batch.tokens[: batch.lengths[0]].tolist()
            == split.ragged("tokens")
            .values[split.ragged("tokens").offsets[batch.rows[0]] :][: batch.lengths[0]]
            .tolist()
        )
    continued = feed()
    continued.load_state_dict(broken.state_dict())
    assert [batch.rows.tolist() for batch in continued] == whole[position:]


def test_each_epoch_and_each_seed_lays_the_runs_in_an_order_of_its_own():
    lengths = np.ones(40 * RUN, np.int32)
    firsts = set()
    for seed in (-2, -1, 0, 1):
        for epoch in range(3):
            plan = LargePlan(lengths, PlanSettings(rows_per_batch=4, seed=seed), epoch)
            firsts.add(
                tuple(
                    sorted(row // RUN for batch in real_rows(plan, 0, WINDOW // 4) for row in batch)
                )
            )
    assert len(firsts) == 12  # which runs meet in the first window
