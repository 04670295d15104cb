"""What is planted holds a run back as it should, and what came is judged by what was predicted."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from benchmarks import doctor_plain, plants
from benchmarks.claim import Options, not_here
from benchmarks.doctor import Diagnosed, chosen, summary_of
from benchmarks.doctor_plain import Script, with_fix
from benchmarks.planted import HEALTHY, PLANTED, QUICK

from flatout.cli.bench import line
from flatout.data.batches.feed import Feed
from flatout.data.batches.plan import PlanSettings
from flatout.data.feeding import FeedKind
from flatout.errors import UserError


def test_every_plant_can_be_named_on_a_command_line():
    named = {
        word.rpartition(".")[2] for each in PLANTED for word in each.words if "._target_=" in word
    }
    assert named == {
        name for name, each in inspect.getmembers(plants, inspect.isclass) if is_plant(each)
    }


def test_there_are_twenty_plants_and_more_and_ten_healthy_runs_each_under_its_name():
    names = [each.name for each in PLANTED]
    assert len(names) == len(set(names)) >= 20
    assert set(QUICK) <= set(names)
    assert len(HEALTHY) == 10


def test_what_needs_a_gpu_is_listed_as_not_applicable_without_one(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert sum(each.why_not() == "there is no GPU" for each in PLANTED) == 3


@pytest.mark.parametrize(
    ("is_native", "share", "applying"),
    [
        (False, 0.5, []),
        (True, 0.5, ["fp32 where bf16 is faster"]),
        (True, 1.8, ["bf16 where fp32 is faster"]),
    ],
)
def test_the_slower_precision_applies_by_the_processor(monkeypatch, is_native, share, applying):
    monkeypatch.setattr("flatout.engine.precision.bf16_is_native_on_cpu", lambda: is_native)
    monkeypatch.setattr("benchmarks.planted.bf16_is_native_on_cpu", lambda: is_native)
    monkeypatch.setattr("flatout.engine.precision.bf16_share", lambda: share)
    assert [
        each.name for each in PLANTED if each.causes == ("precision",) and not each.why_not()
    ] == applying


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
        feed = Feed(
            make_split([3] * 8),
            PlanSettings(rows_per_batch=2, shuffle=is_shuffled),
            kind=FeedKind.resident,
        )
        assert len(list(feed)) == 4
        assert counting.seen == expected


@pytest.mark.usefixtures("put_back")
def test_a_copy_of_a_plant_that_a_rank_receives_is_planted_there_too(make_split):
    kept = pickle.dumps(plants.SlowRank(ms=1.0))
    patch.stopall()
    pickle.loads(kept)
    feed = Feed(make_split([3] * 8), PlanSettings(rows_per_batch=2), kind=FeedKind.resident)
    assert feed.transform is not None


@pytest.mark.usefixtures("put_back")
def test_a_slow_disk_slows_what_is_read_and_not_what_lies_in_memory(make_split, monkeypatch):
    slept = []
    monkeypatch.setattr("benchmarks.plants.time.sleep", slept.append)
    plants.SlowDisk(mb_per_s=1.0)
    for kind, count in ((FeedKind.resident, 0), (FeedKind.threaded, 2)):
        list(Feed(make_split([3] * 8), PlanSettings(rows_per_batch=4), kind=kind))
        assert len([each for each in slept if each < 1e-3]) == count
    feed = Feed(
        make_split([3] * 8), PlanSettings(rows_per_batch=4), kind=FeedKind.workers, workers=1
    )
    assert len(list(feed)) == 2, "workers that were forked read from the same disk"


def diagnosed(
    cause: str, gain: float | None, measured: float | None, causes=("data",)
) -> Diagnosed:
    verdict = {"cause": cause, "sentence": "", "predicted_gain": gain}
    verdict |= {"gain_low": gain and gain / 1.2, "gain_high": gain and gain * 1.2}
    return Diagnosed(
        "x", causes, verdict, None if measured is None else [[100.0], [100.0 * measured]]
    )


@pytest.mark.parametrize(
    ("gain", "measured", "is_within"),
    [
        (2.0, 2.3, True),
        (2.0, 2.5, False),
        (2.0, 1.6, False),
        (None, 2.0, False),
    ],
)
def test_a_fix_is_judged_by_what_came_against_the_predicted_bounds(gain, measured, is_within):
    assert diagnosed("data", gain, measured).is_within is is_within


def test_a_cause_without_a_promise_holds_when_it_is_named_and_a_wrong_one_does_not():
    assert diagnosed("data", None, 0.64).as_claim().holds
    assert not diagnosed("padding", 2.0, 2.0).as_claim().holds
    assert diagnosed("data", 1.5, 0.64).slows
    assert not diagnosed("data", None, 0.64).slows


@pytest.mark.parametrize(
    ("cause", "gain", "measured", "is_quiet"),
    [
        ("nothing", None, None, True),
        ("batch", 1.5, 1.4, True),
        ("batch", 1.5, 1.0, False),
        ("data", None, None, False),
    ],
)
def test_a_healthy_run_is_quiet_or_its_gain_is_confirmed(cause, gain, measured, is_quiet):
    assert diagnosed(cause, gain, measured, causes=()).as_claim().holds is is_quiet


def test_single_plants_and_healthy_runs_are_chosen_by_a_part_of_their_names():
    planted, healthy = chosen(Options(only="ENCODER"))
    assert planted == []
    assert healthy == ["encoder", "encoder, two batches a step", "encoder, small"]
    planted, healthy = chosen(Options(only="one thread"))
    assert [each.name for each in planted] == ["one thread"]
    assert healthy == []
    planted, healthy = chosen(Options())
    assert planted == PLANTED
    assert healthy == list(HEALTHY)
    planted, healthy = chosen(Options(quick=True))
    assert [each.name for each in planted] == list(QUICK)
    assert len(healthy) == 2


def test_a_name_that_is_no_plant_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="no plant and no healthy run 'one thraed'") as refused:
        chosen(Options(only="one thraed"))
    assert "one thread" in str(refused.value)


def test_a_row_shows_every_round_and_one_that_does_not_apply_is_marked():
    row = line(diagnosed("data", 2.0, 2.3).as_claim())
    assert "round 1: 100 rows/s as it was, 230 with the fix (2.30×)" in row
    row = line(not_here("a metric that synchronises", "there is no GPU"))
    assert row.splitlines()[0].endswith("n/a")
    assert "nan" not in row
    assert "does not apply here: there is no GPU" in row


def test_the_table_ends_with_four_figures():
    found = [diagnosed("data", 2.0, 2.3), diagnosed("padding", 2.0, 0.9)]
    rows = list(summary_of(found, [diagnosed("nothing", None, None, causes=())]))
    assert [(row.ours, row.holds) for row in rows] == [
        (1, False),
        (1, False),
        (1, False),
        (0, True),
    ]


def test_the_words_of_a_fix_are_put_into_the_script():
    script = Script(
        sleeps_ms=5, every_n_train_steps=2, accumulate_grad_batches=8, val_check_interval=5
    )
    words = {
        "DataLoader(num_workers=2, persistent_workers=True) torch.set_num_threads(1)": {
            "num_workers": 2,
            "persistent_workers": True,
            "threads": 1,
        },
        "DataLoader(batch_size=32) Trainer(accumulate_grad_batches=1)": {
            "batch_size": 32,
            "accumulate_grad_batches": 1,
        },
        'Trainer(precision="bf16-mixed")': {"precision": "bf16-mixed"},
        "Trainer(val_check_interval=1.0)": {"val_check_interval": 1.0},
        "leaving Sleeps out of Trainer(callbacks=…)": {"sleeps_ms": 0.0},
        "ModelCheckpoint(every_n_epochs=1), or ExactCheckpoint()": {"every_n_train_steps": None},
        "DataLoader(prefetch_factor=8)": {"prefetch_factor": 8},
        "Trainer(callbacks=[FastLoop()])": {"in_fast_loop": True},
        "torch.compile(module)": {"is_compiled": True},
    }
    for said, changed in words.items():
        assert with_fix(script, said) == replace(script, **changed)


@pytest.mark.soak(seconds=5)
def test_ten_scripts_are_planted_and_five_are_healthy_and_each_kind_of_module_trains():
    assert len(doctor_plain.PLANTED) == 10
    assert len(doctor_plain.HEALTHY) == 5
    with torch.random.fork_rng():
        for module in ("mlp", "cnn", "lstm", "bert"):
            found = doctor_plain.train(
                Script(module=module, rows=12, batch_size=4, max_epochs=1), judges=True
            )
            assert found["rate"] > 0
            assert found["verdict"]["sentence"].startswith("a verdict needs 30 steps")
    torch.set_num_threads(1)
