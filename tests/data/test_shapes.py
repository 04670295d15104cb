"""Batches in few shapes: what is added changes neither loss nor gradient, and is little."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tests.data.recordings import uneven_recordings
from tests.params import at_once

from flatout import (
    BiLSTMConfig,
    CellsConfig,
    HeadlinesConfig,
    RNNConfig,
    TaggedTweetsConfig,
    TextCNNConfig,
    TransformerConfig,
    TweetsConfig,
    VocabularyConfig,
    WindowMLPConfig,
)
from flatout.data import SequenceData, TagData, TextData
from flatout.data.batches.plan import BatchLayout
from flatout.data.batches.shapes import MOST_SHAPES, Shape, Shapes, choose_sizes
from flatout.data.batches.store_data import Placement
from flatout.models.encoder.attention import Kernel
from flatout.models.encoder.network import Transformer as Encoder
from flatout.models.encoder.window_shapes import WindowShapes
from flatout.tasks import Classifier, MaskedLanguageModel, SequenceRegressor, Tagger

NO_DROPOUT: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0}
MODELS: dict[str, Any] = {
    "bilstm": BiLSTMConfig(embedding=8, hidden=8, dropout=0.0),
    "textcnn": TextCNNConfig(embedding=8, filters=4, dropout=0.0, embedding_dropout=0.0),
    "transformer": TransformerConfig(hidden=16, layers=2, heads=2, **NO_DROPOUT),
    "padded transformer": TransformerConfig(
        hidden=16, layers=2, heads=2, compute="padded", **NO_DROPOUT
    ),
}


def tags() -> Any:
    data = TagData(sample=TaggedTweetsConfig(rows=200, eval_rows=20), batch_size=16)
    return data, Tagger(MODELS["transformer"])


def several_labels() -> Any:
    """Texts with none to three labels each."""
    random = np.random.default_rng(3)
    words = [f"word{number}" for number in range(40)]
    texts = [" ".join(random.choice(words, random.integers(2, 12))) for _ in range(200)]
    labels = [sorted({*random.choice(list("abcd"), random.integers(0, 4))}) for _ in texts]
    table = pa.table({"text": texts, "labels": labels})
    data = TextData(source=table, text="text", label="labels", problem="multi", batch_size=16)
    return data, Classifier(MODELS["textcnn"])


def windows() -> Any:
    sample = CellsConfig(cells=3, cycles=3, samples=60)
    data = SequenceData(sample=sample, batch_size=16, lookback=12, stride=5)
    return data, SequenceRegressor(RNNConfig(hidden=8))


def recordings(**settings: Any) -> Any:
    """Recordings of different lengths, answered sample by sample."""
    columns = uneven_recordings(80, shortest=5, longest=30)
    data = SequenceData(
        source=columns, features=["a"], target="y", group=["run"], batch_size=4, **settings
    )
    return data, SequenceRegressor(RNNConfig(hidden=8, smoothing="ema"))


def masked_words() -> Any:
    pieces = VocabularyConfig(kind="wordpiece")
    sample = HeadlinesConfig(rows=300, eval_rows=20, classes=4)
    data = TextData(sample=sample, problem="none", batch_size=16, vocabulary=pieces)
    return data, MaskedLanguageModel(MODELS["transformer"])


def short_windows(missing: float) -> Any:
    """Windows at the beginnings of recordings, which a flat network reads; some lack a target."""
    random = np.random.default_rng(3)
    columns: dict[str, Any] = {"run": np.repeat(np.arange(60), 20)}
    for name in ("a", "b", "y"):
        columns[name] = random.normal(size=1200)
    columns["y"][random.random(1200) < missing] = np.nan
    data = SequenceData(
        source=columns,
        features=["a", "b"],
        target="y",
        group=["run"],
        lookback=12,
        stride=5,
        batch_size=16,
        missing="fill",
    )
    return data, SequenceRegressor(WindowMLPConfig(widths=[8], dropout=0.0))


def long_texts(how: str) -> Any:
    """Texts of one to three windows."""
    cut: dict[str, Any] = {"long": "windows", "window": 8, "overlap": 2, "max_length": 24}
    sample = HeadlinesConfig(rows=300, eval_rows=20, classes=4)
    pieces = VocabularyConfig(kind="wordpiece")
    data = TextData(sample=sample, batch_size=16, vocabulary=pieces, **cut)
    return data, Classifier(replace(MODELS["transformer"], windows=how))


def long_tagged_texts() -> Any:
    cut: dict[str, Any] = {"long": "windows", "window": 8, "overlap": 2, "max_length": 24}
    data = TagData(sample=TaggedTweetsConfig(rows=200, eval_rows=20), batch_size=16, **cut)
    return data, Tagger(MODELS["transformer"])


OTHERS: dict[str, Callable[[], Any]] = {
    "tags": tags,
    "masked words": masked_words,
    "recordings": recordings,
    "means of windows": partial(long_texts, "mean"),
    "windows by attention": partial(long_texts, "attention"),
    "tags in windows": long_tagged_texts,
    "several labels": several_labels,
    "windows": windows,
    "short windows": partial(short_windows, 0.0),
    "windows without some targets": partial(short_windows, 0.2),
}


def made(model: Any, sample: Any, rows: int) -> Any:
    pieces = VocabularyConfig(kind="wordpiece")
    data = TextData(sample=sample, batch_size=rows, max_length=64, vocabulary=pieces)
    return placed(data, Classifier(model))


def placed(data: Any, task: Any) -> Any:
    """The data with its feeds, and the task with its network."""
    torch.manual_seed(7)
    data.prepare_data()
    data.setup()
    task.build(data.info)
    layout = BatchLayout.of(task.model)
    data.place(Placement(0, 1, torch.device("cpu"), layout, False))
    return data, task


def shapes_of(data: Any, task: Any) -> Shapes:
    if task.network.window:
        tags = task.labels_are_of_tokens
        return WindowShapes.planned_windows(data.feeds.train, task.network.window, tags=tags)
    is_padded = BatchLayout.of(task.model) is BatchLayout.padded
    return Shapes.planned(
        data.feeds.train,
        is_padded=is_padded,
        tags=task.labels_are_of_tokens,
        reads_rows=task.reads_rows,
        fillers_count=task.leaves_out_unlabelled,
    )


SLOW = {"bilstm", "windows by attention", "tags in windows"}
NAMES = [*MODELS, *OTHERS]


@pytest.mark.parametrize("name", at_once(*(set(NAMES) - SLOW), of=NAMES, seconds=2))
def test_a_batch_in_a_buffer_has_the_loss_and_the_gradients_of_itself(name, monkeypatch):
    # A CPU's own kernel lays rows out by their lengths on the host, which a buffer has not.
    monkeypatch.setattr(Encoder, "_kernel", lambda self, device: Kernel.padded)
    if name in OTHERS:
        data, task = placed(*OTHERS[name]())
    else:
        data, task = made(MODELS[name], HeadlinesConfig(rows=300, eval_rows=20, classes=4), 16)
    shapes = shapes_of(data, task)
    buffers = {}
    compared = 0
    for batch in data.feeds.train:
        shape = shapes.shape_of(batch)
        if isinstance(shape, str):
            continue
        if shape in buffers:
            buffer = shapes.fill(buffers[shape], batch)
        else:
            buffers[shape] = buffer = shapes.make(shape, batch)
        gradients = []
        losses = []
        for form in (batch, buffer):
            task.zero_grad()
            loss = task.training_loss(form)
            loss.backward()
            losses.append(loss.detach())
            gradients.append(
                [weight.grad.clone() for weight in task.parameters() if weight.grad is not None]
            )
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
        compared += 1
    assert compared >= 6
    assert compared > len(buffers)


def test_rows_that_are_added_have_a_token_each_and_fill_the_buffer():
    data, task = made(MODELS["transformer"], TweetsConfig(rows=2_000, eval_rows=20), 32)
    shapes = shapes_of(data, task)
    seen = 0
    for batch in data.feeds.train:
        shape = shapes.shape_of(batch)
        if isinstance(shape, str):
            continue
        buffer = shapes.make(shape, batch)
        rows = torch.diff(buffer.offsets)
        assert torch.equal(rows[: batch.num_rows], batch.lengths)
        assert rows.min() >= 1 and rows.max() <= shape.longest
        assert int(rows.sum()) == buffer.num_tokens == shape.tokens
        assert torch.equal(buffer.tokens[: batch.num_tokens], batch.tokens)
        assert int(buffer.lengths.max()) == shape.longest
        assert int(buffer.lengths.sum()) == shape.tokens
        assert float(buffer.step_rows) == batch.step_rows
        seen += 1
    assert seen >= 50


@pytest.mark.parametrize(
    ("sample", "rows"),
    at_once(
        (TweetsConfig, 128),
        of=itertools.product([HeadlinesConfig, TweetsConfig], [32, 128, 512]),
        seconds=2,
    ),
)
def test_eight_shapes_pad_flat_batches_of_three_epochs_by_at_most_three_per_cent(sample, rows):
    data, task = made(MODELS["transformer"], sample(rows=12_000, eval_rows=20), rows)
    shapes = shapes_of(data, task)
    tokens = 0
    computed = 0
    used = set[Shape]()
    plain = 0
    for epoch in range(3):
        data.feeds.train.set_epoch(epoch)
        for batch in data.feeds.train:
            shape = shapes.shape_of(batch)
            if isinstance(shape, str):
                plain += "other rows" not in shape
                continue
            used.add(shape)
            tokens += batch.num_tokens
            computed += shape.tokens
    assert len(used) <= MOST_SHAPES
    assert plain <= 3
    assert computed / tokens <= 1.03


def test_sizes_pad_as_little_as_any_other_choice():
    random = np.random.default_rng(3)
    for _ in range(100):
        needs = random.integers(1, 15, size=random.integers(1, 30))
        most = int(random.integers(1, 5))
        values = np.unique(needs)
        counts = range(1, min(most, len(values)) + 1)
        choices = [
            choice
            for count in counts
            for choice in itertools.combinations(values, count)
            if choice[-1] == values[-1]
        ]
        chosen = choose_sizes(needs, most)
        assert len(chosen) <= most
        assert padding(needs, chosen) == min(padding(needs, choice) for choice in choices)


def padding(needs: Any, sizes: Any) -> int:
    return sum(int(min(size for size in sizes if size >= need) - need) for need in needs)
