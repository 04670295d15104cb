"""Every kind of feed yields what the plan says, from wherever it is resumed."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatout.data.batches import gather
from flatout.data.batches.feed import Feed, _end_with, choose_feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.gather import DeviceColumn, FixedColumn, HostColumn
from flatout.data.batches.plan import BatchLayout, Plan, PlanSettings
from flatout.data.feeding import FeedKind
from flatout.data.store.store import StoreSplit

KINDS = [FeedKind.resident, FeedKind.threaded, FeedKind.workers]
IN_PROCESS = [FeedKind.resident, FeedKind.threaded]


def contents(feed: Feed) -> list[tuple[list[int], list[int], list[int]]]:
    return [(batch.rows.tolist(), batch.tokens.tolist(), batch.offsets.tolist()) for batch in feed]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_hold_exactly_the_rows_the_plan_names(make_split, kind, several):
    split = make_split(np.arange(1, 60) % 13 + 1, several=several)
    plan = PlanSettings(rows_per_batch=7, seed=3)
    feed = Feed(split, plan, kind=kind, workers=1)
    tokens = split.ragged("tokens")
    planned = Plan(split.ragged("tokens").lengths, plan, epoch=0)
    batches = planned.batches(0, planned.num_batches)
    seen = 0
    for number, batch in enumerate(feed):
        rows = batches.rows[batches.bounds[number] : batches.bounds[number + 1]]
        assert batch.rows.tolist() == rows.tolist()
        for place, row in enumerate(rows):
            own = tokens.values[tokens.offsets[row] : tokens.offsets[row + 1]]
            start, stop = batch.offsets[place : place + 2].tolist()
            assert batch.tokens[start:stop].tolist() == own.tolist()
            assert labels_of(batch, place) == labels_in_store(split, row, several)
        seen += batch.num_rows
    assert seen == 59


def labels_of(batch: FlatBatch, place: int) -> list[int]:
    if batch.target_offsets is None:
        return [int(batch.targets[place])]
    start, stop = batch.target_offsets[place : place + 2].tolist()
    return batch.targets[start:stop].tolist()


def labels_in_store(split, row: int, several: bool) -> list[int]:
    if not several:
        return [int(split.fixed("targets")[row])]
    targets = split.ragged("targets")
    return targets.values[targets.offsets[row] : targets.offsets[row + 1]].tolist()


def fixed_split(rows: int, width: int = 4) -> StoreSplit:
    """Rows of equally many bytes, as packed bits are."""
    values = np.random.default_rng(0).integers(0, 256, (rows, width), dtype=np.uint8)
    return StoreSplit("train", rows, {"tokens": values})


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_width_come_as_the_store_holds_them(kind):
    split = fixed_split(50)
    feed = Feed(split, PlanSettings(rows_per_batch=8, seed=1), kind=kind, workers=1)
    seen = []
    for batch in feed:
        assert batch.padded()[0].tolist() == split.fixed("tokens")[batch.rows.numpy()].tolist()
        assert batch.offsets.tolist() == list(range(0, 4 * batch.num_rows + 1, 4))
        seen += batch.rows.tolist()
    assert sorted(seen) == list(range(50))


def test_fixed_rows_are_gathered_alike_by_numpy_and_by_torch():
    column = FixedColumn(fixed_split(40).fixed("tokens"), torch.device("cpu"))
    rows = np.array([3, 39, 0, 3])
    by_numpy = column.gather(rows, np.full(4, 4))
    column.host = None  # as it is on a device
    for one, other in zip(by_numpy, column.gather(rows, np.full(4, 4)), strict=True):
        assert torch.equal(one, other)


def test_a_feed_stays_where_it_was_while_all_its_rows_are_read():
    feed = Feed(fixed_split(30), PlanSettings(rows_per_batch=8, seed=2))
    whole = contents(feed.all_rows())
    taken = iter(feed)
    next(taken)
    assert contents(feed.all_rows()) == whole
    assert feed.state_dict() == {"epoch": 0, "consumed": 1}
    assert [(b.rows.tolist(), b.tokens.tolist(), b.offsets.tolist()) for b in taken] == whole[1:]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(st.data())
def test_a_restored_feed_yields_exactly_the_rest(make_split, data):
    split = make_split(np.arange(1, 90) % 17 + 1)
    plan = PlanSettings(
        rows_per_batch=data.draw(st.integers(1, 9)),
        accumulate=data.draw(st.integers(1, 2)),
        layout=data.draw(st.sampled_from(list(BatchLayout))),
    )
    epoch = data.draw(st.integers(0, 2))
    whole = Feed(split, plan, kind=FeedKind.resident)
    whole.set_epoch(epoch)
    expected = contents(whole)
    taken = data.draw(st.integers(0, len(expected) - 1))
    stopped = Feed(split, plan, kind=data.draw(st.sampled_from(IN_PROCESS)))
    stopped.set_epoch(epoch)
    for _, _ in zip(range(taken), stopped, strict=False):
        pass
    state = stopped.state_dict()
    assert state["consumed"] in (taken, taken + 1)
    state["consumed"] = taken
    resumed = Feed(split, plan, kind=data.draw(st.sampled_from(IN_PROCESS)))
    resumed.load_state_dict(state)
    assert contents(resumed) == expected[taken:]


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_counts_batches_taken_and_not_those_prepared_ahead(make_split, kind):
    feed = Feed(make_split(np.full(64, 3)), PlanSettings(rows_per_batch=4), kind=kind, workers=1)
    batches = iter(feed)
    next(batches)
    next(batches)
    assert feed.state_dict() == {"epoch": 0, "consumed": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_yield_the_same_batches(make_split, kind):
    split = make_split(np.arange(1, 40) % 9 + 1, several=True)
    plan = PlanSettings(rows_per_batch=4, accumulate=2, layout=BatchLayout.padded)
    assert contents(Feed(split, plan, kind=kind, workers=2)) == contents(
        Feed(split, plan, kind=FeedKind.resident)
    )


def test_another_epoch_is_another_order_of_the_same_rows(make_split):
    feed = Feed(
        make_split(np.arange(1, 40) % 9 + 1), PlanSettings(rows_per_batch=4), kind=FeedKind.resident
    )
    first = contents(feed)
    feed.set_epoch(1)
    second = contents(feed)
    assert first != second
    assert sorted(row for rows, _, _ in first for row in rows) == sorted(
        row for rows, _, _ in second for row in rows
    )


def test_a_transform_is_applied_to_every_batch(make_split):
    def drop_labels(batch: FlatBatch) -> FlatBatch:
        batch.targets = None
        return batch

    split = make_split(np.full(20, 3))
    for kind in KINDS:
        feed = Feed(
            split, PlanSettings(rows_per_batch=8), kind=kind, transform=drop_labels, workers=1
        )
        assert [batch.targets for batch in feed] == [None, None, None]


def test_a_batch_is_completed_in_this_process_after_it_was_transformed(make_split):
    def transform(batch: FlatBatch) -> FlatBatch:
        return replace(batch, targets=torch.tensor([os.getpid()]))

    def complete(batch: FlatBatch) -> FlatBatch:
        assert batch.targets is not None
        return replace(batch, targets=torch.cat([batch.targets, torch.tensor([os.getpid()])]))

    split = make_split(np.full(20, 3))
    for kind in KINDS:
        feed = Feed(
            split,
            PlanSettings(rows_per_batch=8),
            kind=kind,
            transform=transform,
            complete=complete,
            workers=1,
        )
        processes = [batch.targets.tolist() for batch in feed if batch.targets is not None]
        assert [completed for _, completed in processes] == [os.getpid()] * 3
        has_workers = kind is FeedKind.workers
        assert all((made != os.getpid()) == has_workers for made, _ in processes)


def test_big_token_ids_survive_their_two_bytes(make_split):
    split = make_split(np.full(50, 20), vocabulary=65_000)
    tokens = torch.cat([batch.tokens for batch in Feed(split, PlanSettings(rows_per_batch=50))])
    assert tokens.max() > 40_000
    assert sorted(tokens.tolist()) == sorted(split.ragged("tokens").values.tolist())


def test_auto_takes_the_resident_feed_only_where_the_store_fits():
    cpu = torch.device("cpu")
    assert choose_feed(FeedKind.auto, 1_000, cpu).value is FeedKind.resident
    assert choose_feed(FeedKind.auto, 10**15, cpu).value is FeedKind.threaded
    assert choose_feed(FeedKind.workers, 1_000, cpu).why == "asked for"


def test_gathering_on_a_device_equals_gathering_on_the_host(make_split):
    for several in (False, True):
        split = make_split(np.arange(1, 80) % 11 + 1, several=several, vocabulary=60_000)
        name = "targets" if several else "tokens"
        rows = np.random.default_rng(0).permutation(79)[:40]
        lengths = split.ragged(name).lengths[rows].astype(np.int64)
        host = HostColumn(split.ragged(name)).gather(rows, lengths)
        device = DeviceColumn(split.ragged(name), torch.device("cpu")).gather(rows, lengths)
        assert torch.equal(host[0], device[0])
        assert torch.equal(host[1], device[1])


def _worker_of_nobody() -> None:
    _end_with(parent=0, number=0)
    time.sleep(60)


def test_a_worker_whose_parent_was_killed_while_it_began_ends():
    worker = multiprocessing.get_context("fork").Process(target=_worker_of_nobody)
    worker.start()
    worker.join(10)
    assert worker.exitcode == 1


class RecordedStream:
    """A stand-in for a GPU's stream, which writes down what it is asked for, and in
    which thread.
    """

    def __init__(self, name: str, told: list[str]) -> None:
        self.name = name
        self.told = told

    def record_event(self) -> str:
        self.told.append(f"{self.name} marks its copies")
        return f"the copies of {self.name}"

    def wait_event(self, event: str) -> None:
        self.told.append(f"{self.name} waits for {event}")


def test_the_threaded_feed_copies_to_a_gpu_on_a_stream_of_its_own_and_steps_wait_there(
    make_split, monkeypatch
):
    told: list[str] = []
    current = [RecordedStream("the steps' stream", told)]

    @contextmanager
    def stream(chosen: RecordedStream) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    def copied(
        tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if device.type == "cpu":
            return tensor
        assert non_blocking
        assert tensor.is_page_locked
        told.append(f"{current[-1].name} copies")
        return tensor

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        tensor.is_page_locked = True
        return tensor

    gather._copying.cache_clear()
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda device: RecordedStream("the feed's stream", told)
    )
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.Tensor, "to", copied)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, kept: told.append(f"kept for {kept.name}")
    )
    feed = Feed(
        make_split([3, 4, 5]), PlanSettings(rows_per_batch=3), kind=FeedKind.threaded, device="cuda"
    )
    (batch,) = list(feed)
    gather._copying.cache_clear()
    assert batch.num_rows == 3
    assert told == [
        *["the feed's stream copies"] * 3,
        "the feed's stream marks its copies",
        "the steps' stream waits for the copies of the feed's stream",
        *["kept for the steps' stream"] * 3,
    ]
