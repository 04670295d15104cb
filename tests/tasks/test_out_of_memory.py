"""A step that runs out of memory is repeated in smaller pieces, and the run ends with the weights
it would have had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flatout import (
    BitMLPConfig,
    BitsDataConfig,
    EncodingConfig,
    GramsConfig,
    OptimConfig,
    PeopleConfig,
)
from flatout.bits.grams import LABELS
from flatout.bits.info import GramLabels
from flatout.bits.task import GramDecoder, Recombined
from flatout.callbacks.run_curves import RunCurves
from flatout.data.batches.feed import Feed
from flatout.data.batches.plan import BatchLayout, PlanSettings
from flatout.data.feeding import FeedKind
from flatout.data.problem import Problem
from flatout.data.store.store import StoreSplit
from flatout.engine.fast_loop import FastLoop, fast_loop_of
from flatout.engine.fused_adamw import FusedAdamW
from flatout.errors import UserError
from flatout.models.encoder.transformer import Outputs
from flatout.tasks.classification import Classifier, ClassWeights
from flatout.tasks.tagging import Tagger, TagLabels
from flatout.tasks.task import Task
from tests.encoders import calm_encoder
from tests.scarce import Scarce
from tests.stores import open_store
from tests.tasks.test_step import fast_trainer, make_task
from tests.trainers import KeptFlushes, flat_weights

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

SOAK = pytest.mark.soak(seconds=5)
LENGTHS = [3, 5, 2, 7, 4, 4, 1, 6, 2, 3, 5] * 3
EPS = 1e-3
"""Some gradients of attention are zero but for rounding, which Adam with a smaller one would make
into whole steps."""
PLACES = {
    "bilstm": "model.output.weight",
    "textcnn": "model.output.weight",
    "encoder": "model.net.classifier.weight",
}


def training_values(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name.startswith("train/")}


def train_epoch(
    task: Task, feed: Feed, folder, scarce: Scarce | None = None, loop: FastLoop | None = None
) -> tuple[list[Any], torch.Tensor]:
    """What an epoch tells, and the weights at the end."""
    kept = KeptFlushes()
    if scarce is not None:
        scarce.plant(task)
    loop = loop or FastLoop()
    fast_trainer(folder, 1, RunCurves([kept], 1), feed=feed, loop=loop).fit(
        task, train_dataloaders=feed
    )
    told = [training_values(values) for values in kept.flushes]
    return told, flat_weights(task.model)


def encoder(outputs: Outputs) -> torch.nn.Module:
    torch.manual_seed(0)
    config = calm_encoder(layers=2)
    return config.build(outputs, vocabulary_size=50, padding_id=0, separator_id=None)


def classifier(kind: str, problem: Problem, **settings: Any) -> Classifier:
    task = make_task("bilstm" if kind == "encoder" else kind, problem, total_steps=12, **settings)
    task.optim.eps = EPS
    if kind == "encoder":
        task.model = encoder(Outputs(task.labels.classes, problem.value))
    return task


def feed_of(
    split: StoreSplit, rows: int, accumulate: int, layout: BatchLayout = BatchLayout.padded
) -> Feed:
    plan = PlanSettings(rows_per_batch=rows, accumulate=accumulate, layout=layout)
    return Feed(split, plan, kind=FeedKind.resident)


@pytest.mark.parametrize(
    ("kind", "problem", "rows", "accumulate"),
    [
        pytest.param("bilstm", Problem.multi, 4, 3, marks=SOAK),
        ("encoder", Problem.single, 4, 3),
        pytest.param("bilstm", Problem.single, 8, 1, marks=SOAK),
        pytest.param("textcnn", Problem.regression, 8, 1, marks=SOAK),
        pytest.param("encoder", Problem.multi, 8, 1, marks=SOAK),
    ],
)
def test_losses_and_weights_are_those_of_a_run_with_memory(
    make_split, tmp_path, kind, problem, rows, accumulate
):
    split = make_split(LENGTHS, several=problem is Problem.multi)
    if problem is Problem.regression:
        split.columns["targets"] = split.fixed("targets").astype("float32")
    layout = BatchLayout.flat if kind == "encoder" else BatchLayout.padded
    weigh = ClassWeights.none if problem is Problem.regression else ClassWeights.auto
    found = []
    for where in ("nowhere", "forward", "backward", PLACES[kind]):
        task = classifier(kind, problem, class_weights=weigh)
        scarce = Scarce(3, steps=(1, 2), where=where) if where != "nowhere" else None
        found.append(train_epoch(task, feed_of(split, rows, accumulate, layout), tmp_path, scarce))
        if scarce is not None:
            assert set(scarce.fired) == {1}
            assert fast_loop_of(task.trainer).pieces.counts["training"] >= 2
    told, weights = found[0]
    for others, other_weights in found[1:]:
        assert [pytest.approx(each, abs=1e-5) for each in others] == told
        torch.testing.assert_close(other_weights, weights, atol=1e-6, rtol=0)


def bits_task(data: Any) -> GramDecoder:
    torch.manual_seed(0)
    labels = GramLabels(
        LABELS, data.facts["hashed"], data.facts["class_counts"], data.summary()["rows"]["train"]
    )
    model = BitMLPConfig(widths=[8], start="random").build(
        num_inputs=64, is_set=False, **labels.network_sizes()
    )
    task = GramDecoder(
        model, GramsConfig(recombine=0.7), OptimConfig(eps=EPS), labels=labels, total_steps=20
    )
    counts = torch.arange(1, 42) % 5 + 1  # few texts, so that they are taken round and round
    ids = torch.arange(int(counts.sum())) * 7 % labels.num_targets
    task.recombined.append(Recombined(ids, counts, torch.device("cpu")))
    return task


@pytest.mark.soak(seconds=4)
@pytest.mark.parametrize("accumulate", [3, pytest.param(1, marks=SOAK)])
def test_bit_strings_take_the_same_recombined_texts(tmp_path, accumulate):
    data = open_store(
        BitsDataConfig(sample=PeopleConfig(rows=120), encoding=EncodingConfig(size=64, hashes=2))
    )
    found = []
    for where in ("nowhere", "forward", "backward", "model.composer.0.0.weight"):
        task = bits_task(data)
        scarce = Scarce(5, steps=(1, 2), where=where) if where != "nowhere" else None
        feed = feed_of(data.store.splits["train"], 16, accumulate, BatchLayout.flat)
        found.append((*train_epoch(task, feed, tmp_path, scarce), task.recombined[0].place))
        assert scarce is None or scarce.fired
    told, weights, place = found[0]
    for others, other_weights, other_place in found[1:]:
        assert [pytest.approx(each, rel=1e-5) for each in others] == told
        torch.testing.assert_close(other_weights, weights, atol=1e-6, rtol=0)
        assert other_place == place


@pytest.mark.soak(seconds=4)
def test_tags_go_with_their_words(make_split, tmp_path):
    split = make_split(LENGTHS, several=True)
    tokens = split.ragged("tokens")
    split.columns["targets"] = type(tokens)(
        (tokens.values % 3).astype("int32"), tokens.offsets, tokens.lengths
    )
    names = ["O", "B-x", "I-x"]
    found = []
    for where in ("nowhere", "forward", "backward"):
        labels = TagLabels(names, 4.0, {})
        task = Tagger(
            encoder(Outputs(names, "tags")),
            optim=OptimConfig(lr=0.01, eps=EPS),
            labels=labels,
            total_steps=12,
        )
        scarce = Scarce(3, steps=(1,), where=where) if where != "nowhere" else None
        found.append(train_epoch(task, feed_of(split, 8, 1, BatchLayout.flat), tmp_path, scarce))
        assert scarce is None or scarce.fired
    for told, weights in found[1:]:
        assert [pytest.approx(each, abs=1e-5) for each in told] == found[0][0]
        torch.testing.assert_close(weights, found[0][1], atol=1e-6, rtol=0)


def test_a_batch_that_fitted_once_is_cut_no_further(make_split, tmp_path):
    task = classifier("bilstm", Problem.single)
    scarce = Scarce(6)
    heard: list[tuple[Any, ...]] = []
    loop = FastLoop()
    loop.pieces.report = lambda *told: heard.append(told)
    train_epoch(task, feed_of(make_split([4] * 24), 12, 1), tmp_path, scarce, loop)
    assert scarce.fired == [0]
    assert loop.pieces.counts["training"] == 2
    assert loop.pieces.num_out_of_memory == 1
    assert heard == [("training", 2, 1, 0, "CUDA out of memory. Tried to allocate 2.00 GiB", False)]


@pytest.mark.soak(seconds=3)
def test_a_single_row_that_is_too_much_ends_the_run_with_what_would_help(make_split, tmp_path):
    with pytest.raises(UserError) as caught:
        train_epoch(
            classifier("bilstm", Problem.single),
            feed_of(make_split([7] * 16), 8, 1),
            tmp_path,
            Scarce(0),
        )
    said = str(caught.value)
    assert "out of memory at step 1" in said
    assert "a single row" in said
    assert "at most 7 tokens" in said
    assert "2.00 GiB" in said
    for fix in ("data.max_length", "precision=bf16"):
        assert fix in said
    assert "checkpoint is kept" in said


def test_other_errors_pass_as_they_are(make_split, tmp_path):
    task = classifier("bilstm", Problem.single)

    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    task.model.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        train_epoch(task, feed_of(make_split(LENGTHS), 8, 1), tmp_path)
    assert fast_loop_of(task.trainer).pieces.num_out_of_memory == 0


def test_nothing_of_the_failed_pass_is_held_when_it_is_repeated(make_split, tmp_path):
    """The activations of the pass that failed would take the memory that the repeat needs."""
    import weakref

    task = classifier("bilstm", Problem.single)
    scarce = Scarce(6, where="backward")
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    task.model.register_forward_pre_hook(
        lambda *_: alive.append(sum(each() is not None for each in made))
    )
    task.model.register_forward_hook(
        lambda module, inputs, outputs: made.append(weakref.ref(outputs))
    )
    train_epoch(task, feed_of(make_split([4] * 12), 12, 1), tmp_path, scarce)
    assert scarce.fired == [0]
    assert alive[1] == 0


def test_random_numbers_begin_where_the_step_began(make_split, tmp_path):
    """The same pieces draw the same dropout, whether they were asked for or come of a repeat."""
    split = make_split([4] * 24)
    weights = []
    for pieces, scarce in ((2, None), (1, Scarce(6, where="backward"))):
        task = classifier("bilstm", Problem.single)
        task.model.dropout = torch.nn.Dropout(0.5)
        loop = FastLoop()
        loop.pieces.counts["training"] = pieces
        torch.manual_seed(1)
        weights.append(train_epoch(task, feed_of(split, 12, 1), tmp_path, scarce, loop)[1])
    assert torch.equal(*weights)
    assert bool(weights[0].isfinite().all())


def test_batch_normalisation_notes_each_row_once(tmp_path):
    """Its means of smaller pieces differ, but those of the failed pass leave no trace."""
    data = open_store(
        BitsDataConfig(sample=PeopleConfig(rows=120), encoding=EncodingConfig(size=64, hashes=2))
    )
    found = []
    for pieces, scarce in ((2, None), (1, Scarce(8, where="backward"))):
        task = bits_task(data)
        model = BitMLPConfig(widths=[8], start="random", norm="batch").build(
            num_inputs=64, is_set=False, **task.labels.network_sizes()
        )
        task.model = model
        torch.manual_seed(0)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.1)
        loop = FastLoop()
        loop.pieces.counts["training"] = pieces
        train_epoch(
            task,
            feed_of(data.store.splits["train"], 16, 1, BatchLayout.flat),
            tmp_path,
            scarce,
            loop,
        )
        found.append(torch.cat([value.flatten().float() for value in model.state_dict().values()]))
    assert torch.equal(*found)


class ScarceState(FusedAdamW):
    """Has no memory for its state so many times."""

    lacks = 1

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> Any:
        if self.lacks:
            self.lacks -= 1
            weight = self.param_groups[0]["params"][0]
            self.state[weight]["step"] = torch.zeros(())  # half made
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
        return super().step(closure)

    # the fast loop leaves optimizers that it does not know to Lightning
    step.__module__ = "torch.optim.adamw"


@pytest.mark.parametrize("times", [1, 2])
def test_an_optimizer_without_memory_for_its_state_is_tried_once_more(
    make_split, tmp_path, times, monkeypatch
):
    monkeypatch.setattr("flatout.engine.optimizer.FusedAdamW", ScarceState)
    monkeypatch.setattr(ScarceState, "lacks", 0)
    split = make_split(LENGTHS)
    _, expected = train_epoch(classifier("bilstm", Problem.single), feed_of(split, 8, 1), tmp_path)
    monkeypatch.setattr(ScarceState, "lacks", times)
    if times == 1:
        assert torch.equal(
            train_epoch(classifier("bilstm", Problem.single), feed_of(split, 8, 1), tmp_path)[1],
            expected,
        )
        return
    with pytest.raises(
        UserError, match=r"memory ran out in the first step of the optimizer.*9\.00 GiB"
    ):
        train_epoch(classifier("bilstm", Problem.single), feed_of(split, 8, 1), tmp_path)
