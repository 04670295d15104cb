"""The plan's promises, held against generated lengths, sizes, ranks and worlds."""

from __future__ import annotations

import hypothesis
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.data.plans import plans_of_all_ranks, real_rows
from tests.refusals import refused

from flatout.data.batches.plan import BatchLayout, Plan, PlanSettings, count_batches

lengths_of_rows = st.lists(st.integers(1, 40), min_size=1, max_size=300).map(
    lambda rows: np.array(rows, np.int32)
)
layouts = st.sampled_from(list(BatchLayout))


@st.composite
def settings_of_plans(draw: st.DrawFn) -> PlanSettings:
    return PlanSettings(
        rows_per_batch=draw(st.integers(1, 40)),
        tokens_per_batch=draw(st.one_of(st.none(), st.integers(40, 400))),
        accumulate=draw(st.integers(1, 3)),
        layout=draw(layouts),
        shuffle=draw(st.booleans()),
        seed=draw(st.integers(0, 5)),
        world=draw(st.integers(1, 4)),
        megabatch_steps=draw(st.integers(1, 5)),
    )


@given(lengths_of_rows, settings_of_plans(), st.integers(0, 3))
def test_every_row_comes_exactly_once_an_epoch_over_all_ranks(lengths, settings, epoch):
    seen = [
        row
        for plan in plans_of_all_ranks(Plan, lengths, settings, epoch)
        for batch in real_rows(plan)
        for row in batch
    ]
    assert sorted(seen) == list(range(len(lengths)))


@given(lengths_of_rows, settings_of_plans())
def test_all_ranks_make_the_same_number_of_batches_in_every_epoch(lengths, settings):
    counts = {
        plan.num_batches
        for epoch in range(3)
        for plan in plans_of_all_ranks(Plan, lengths, settings, epoch)
    }
    assert counts == {count_batches(lengths, settings)}


@given(lengths_of_rows, settings_of_plans())
def test_no_batch_is_empty_and_fillers_stand_only_where_a_rank_got_no_row(lengths, settings):
    for plan in plans_of_all_ranks(Plan, lengths, settings):
        batches = plan.batches(0, plan.num_batches)
        sizes = np.diff(batches.bounds)
        assert (sizes >= 1).all()
        assert ((sizes == batches.num_real) | ((sizes == 1) & (batches.num_real == 0))).all()


@given(lengths_of_rows, settings_of_plans())
def test_rows_of_a_step_are_counted_over_all_ranks_and_micro_batches(lengths, settings):
    plans = plans_of_all_ranks(Plan, lengths, settings)
    all_batches = [plan.batches(0, plan.num_batches) for plan in plans]
    real = sum(batches.num_real for batches in all_batches).reshape(-1, settings.accumulate).sum(1)
    for batches in all_batches:
        np.testing.assert_array_equal(batches.step_rows, np.repeat(real, settings.accumulate))
        ends = np.arange(1, len(batches.num_real) + 1) % settings.accumulate == 0
        np.testing.assert_array_equal(batches.ends_step, ends)


@given(lengths_of_rows, settings_of_plans(), st.data())
def test_seeking_gives_the_same_batches_as_reading_from_the_start(lengths, settings, data):
    plan = plans_of_all_ranks(Plan, lengths, settings)[-1]
    start = data.draw(st.integers(0, plan.num_batches - 1))
    stop = data.draw(st.integers(start + 1, plan.num_batches))
    whole = plan.batches(0, plan.num_batches)
    part = plan.batches(start, stop)
    for offset, number in enumerate(range(start, stop)):
        from_whole = whole.rows[whole.bounds[number] : whole.bounds[number + 1]]
        np.testing.assert_array_equal(
            from_whole, part.rows[part.bounds[offset] : part.bounds[offset + 1]]
        )
    np.testing.assert_array_equal(whole.num_real[start:stop], part.num_real)
    np.testing.assert_array_equal(whole.step_rows[start:stop], part.step_rows)


@given(lengths_of_rows, settings_of_plans())
def test_rows_of_a_batch_come_shortest_first(lengths, settings):
    for batch in real_rows(plans_of_all_ranks(Plan, lengths, settings)[0]):
        assert (np.diff(lengths[batch]) >= 0).all()


@given(lengths_of_rows, settings_of_plans())
def test_ranks_differ_by_at_most_one_row_and_one_row_of_tokens(lengths, settings):
    plans = plans_of_all_ranks(Plan, lengths, settings)
    for batches in zip(*(real_rows(plan) for plan in plans), strict=True):
        counts = [len(batch) for batch in batches]
        tokens = [int(lengths[np.array(batch, int)].sum()) for batch in batches]
        assert max(counts) - min(counts) <= 1
        assert max(tokens) - min(tokens) <= lengths.max()


@given(lengths_of_rows, settings_of_plans())
def test_no_batch_passes_its_rows_or_its_token_cap(lengths, settings):
    for plan in plans_of_all_ranks(Plan, lengths, settings):
        for batch in real_rows(plan):
            cost = (
                int(lengths[batch].max()) * len(batch)
                if settings.layout is BatchLayout.padded and batch
                else 0
            )
            if settings.tokens_per_batch is None:
                assert len(batch) <= settings.rows_per_batch
            else:
                assert (
                    max(cost, int(lengths[batch].sum()) if batch else 0)
                    <= settings.tokens_per_batch
                )


@given(
    lengths_of_rows,
    st.sampled_from(
        [
            (1, 4),
            (2, 2),
            (4, 1),
        ]
    ),
    layouts,
    st.integers(0, 3),
)
def test_a_step_holds_the_same_rows_however_it_is_divided(lengths, division, layout, epoch):
    world, accumulate = division
    whole = Plan(lengths, PlanSettings(rows_per_batch=12, layout=layout), epoch)
    settings = PlanSettings(rows_per_batch=3, accumulate=accumulate, world=world, layout=layout)
    ranks = [real_rows(plan) for plan in plans_of_all_ranks(Plan, lengths, settings, epoch)]
    for step, rows in enumerate(real_rows(whole)):
        micro_batches = range(step * accumulate, (step + 1) * accumulate)
        together = [row for rank in ranks for i in micro_batches for row in rank[i]]
        assert sorted(together) == sorted(rows)


@given(layouts, st.integers(0, 50))
def test_no_epoch_repeats_an_order_and_the_same_epoch_always_does(layout, seed):
    lengths = np.random.default_rng(seed).integers(3, 30, 400).astype(np.int32)
    settings = PlanSettings(rows_per_batch=16, layout=layout, seed=seed)
    first, again, second = (Plan(lengths, settings, epoch) for epoch in (0, 0, 1))
    np.testing.assert_array_equal(first.order, again.order)
    steps_of_first = set(map(frozenset, real_rows(first)))
    steps_of_second = set(map(frozenset, real_rows(second)))
    assert len(steps_of_first & steps_of_second) <= 1


def test_length_buckets_leave_little_padding_at_headline_lengths():
    lengths = np.clip(np.random.default_rng(0).normal(10.5, 3.4, 100_000), 1, 40).astype(np.int32)
    batches = Plan(lengths, PlanSettings(rows_per_batch=512, layout=BatchLayout.padded)).batches(
        0, 196
    )
    rows = lengths[batches.rows]
    computed = (np.maximum.reduceat(rows, batches.bounds[:-1]) * np.diff(batches.bounds)).sum()
    assert 1 - rows.sum() / computed <= 0.02


def test_random_rows_are_the_textbook_batches():
    lengths = np.arange(1, 101, dtype=np.int32)
    plan = Plan(lengths, PlanSettings(rows_per_batch=32, seed=3))
    assert [len(rows) for rows in real_rows(plan)] == [32, 32, 32, 4]


def test_a_token_cap_below_the_longest_row_is_a_clear_error():
    with refused("data.tokens_per_batch", 30, allowed="40 or more here"):
        Plan(np.array([5, 40], np.int32), PlanSettings(tokens_per_batch=30))


def test_a_split_without_rows_has_no_steps():
    assert Plan(np.empty(0, np.int32), PlanSettings()).num_batches == 0


@given(
    num_rows=st.one_of(st.integers(1, 300), st.sampled_from([2**16, 100_000, 2**17 + 1])),
    longest=st.sampled_from([1, 8_192, 2**31 - 2, 2**47, 2**62]),
    rows_per_batch=st.sampled_from([1, 8, 32, 70_000]),
    layout=layouts,
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
)
@hypothesis.example(
    num_rows=300, longest=2**62, rows_per_batch=1, layout=BatchLayout.flat, shuffle=True, seed=0
)
@hypothesis.example(
    num_rows=100_000, longest=2**47, rows_per_batch=1, layout=BatchLayout.flat, shuffle=True, seed=0
)
@hypothesis.settings(max_examples=30, deadline=None)
def test_rows_stand_in_order_of_step_length_and_chance_up_to_the_longest_lengths(
    num_rows, longest, rows_per_batch, layout, shuffle, seed
):
    lengths = np.random.default_rng(seed).integers(1, 5, num_rows) * (longest // 5) + 1
    lengths[seed % num_rows] = longest
    plan = Plan(
        lengths,
        PlanSettings(rows_per_batch=rows_per_batch, layout=layout, shuffle=shuffle, seed=seed),
    )
    chance = np.random.Generator(np.random.Philox(key=[seed, 0]))
    drawn = chance.permutation(num_rows) if shuffle else np.arange(num_rows)
    num_steps = -(-num_rows // rows_per_batch)
    step = np.arange(num_rows) // rows_per_batch
    if not shuffle:
        group = np.zeros_like(step)
    elif layout is BatchLayout.flat:
        group = step
    else:
        group = step * max(1, round(num_steps / 100)) // num_steps
    expected = drawn[np.lexsort((np.arange(num_rows), lengths[drawn], group))]
    if shuffle and layout is BatchLayout.padded:
        expected = np.concatenate(
            [expected[step == moved] for moved in chance.permutation(num_steps)]
        )
    np.testing.assert_array_equal(plan.order, expected)


def test_one_enormous_length_loses_no_row():
    lengths = np.full(100_000, 7)
    lengths[3] = 2**31 - 2
    for cap in (None, 2**34):
        plan = Plan(lengths, PlanSettings(rows_per_batch=1, tokens_per_batch=cap))
        assert len(np.unique(plan.order)) == 100_000


def test_steps_under_a_token_cap_stay_even_where_tokens_times_steps_pass_64_bits():
    lengths = np.full(20_000, 2**40)
    plan = Plan(lengths, PlanSettings(tokens_per_batch=4 * 2**40))
    assert set(np.diff(plan.bounds)) <= {2, 3}
