"""Shapes of captured steps: how many there are, and the padding that they add to batches.

A step is captured for each shape, so batches are brought to few (`data/batches/shapes.py`). Flat
batches get filler rows. Padded ones get a longer rectangle, beyond their own padding to the longest
row. Counted over the second epoch, as the shapes are chosen from the first one's plan.

Beside it stands the least padding of eight lengths, whichever way rows are put into batches: each
row then gets the next of eight lengths, which are chosen from all rows. No plan can have less.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.claim import Claim, Options, bounded, quiet
from flatout import HeadlinesConfig, TweetsConfig, VocabularyConfig
from flatout.data import TextData
from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.plan import BatchLayout
from flatout.data.batches.shapes import MOST_SHAPES, Shape, Shapes, choose_sizes
from flatout.data.batches.store_data import Placement

_MOST_ADDED = 0.03
_ROWS_A_BATCH = (32, 128, 512)


def claims(options: Options) -> Iterator[Claim]:
    """Shapes and padding of two sets of texts, in words for padded models and in pieces for flat
    ones.
    """
    headlines = options.choose(140_000, 12_000, 1_200)
    tweets = options.choose(12_000, 12_000, 1_200)
    samples: dict[str, Any] = {
        "headlines": HeadlinesConfig(rows=headlines, eval_rows=20),
        "tweets": TweetsConfig(rows=tweets, eval_rows=20),
    }
    for name, sample in samples.items():
        for rows in _ROWS_A_BATCH:
            yield _flat_claim(f"{name}, {rows} rows", _feed(sample, rows, BatchLayout.flat))
        for rows in _ROWS_A_BATCH:
            yield _padded_claim(f"{name}, {rows} rows", _feed(sample, rows, BatchLayout.padded))


def _feed(sample: Any, rows: int, layout: BatchLayout) -> Feed:
    kind: Any = "word" if layout is BatchLayout.padded else "wordpiece"
    with quiet():
        data = TextData(
            sample=sample, batch_size=rows, max_length=64, vocabulary=VocabularyConfig(kind=kind)
        )
        data.prepare_data()
        data.setup()
        data.place(Placement(0, 1, torch.device("cpu"), layout, False))
        return data.feeds.train


def _flat_claim(name: str, feed: Feed) -> Claim:
    shapes = Shapes.planned(feed, is_padded=False)
    used, batches = _find_shapes(feed, shapes)
    tokens, computed = shapes.count_tokens(used, batches)
    note = f"{len(set(used))} shapes"
    title = f"{name}, flat: padding that shapes add"
    return bounded(title, 100 * (computed / tokens - 1), "%", most=100 * _MOST_ADDED, note=note)


def _padded_claim(name: str, feed: Feed) -> Claim:
    shapes = Shapes.planned(feed, is_padded=True)
    used, batches = _find_shapes(feed, shapes)
    tokens, computed = shapes.count_tokens(used, batches)
    longest = np.array([batch.longest() for batch in batches])
    own = shapes.rows * longest.sum() / tokens
    rows = torch.cat([batch.lengths for batch in batches]).numpy()
    least_of_any_plan = _padding(rows, MOST_SHAPES) / own
    enough = next(n for n in range(1, len(longest) + 1) if _padding(longest, n) <= 1 + _MOST_ADDED)
    note = (
        f"{len(set(used))} shapes; batches have {own - 1:.1%} of their own; any batches in"
        f" {MOST_SHAPES} lengths: at least {least_of_any_plan - 1:.1%};"
        f" {_MOST_ADDED:.0%} takes {enough} shapes"
    )
    title = f"{name}, padded: padding that shapes add"
    added = computed / (own * tokens) - 1
    return bounded(title, 100 * added, "%", most=100 * _MOST_ADDED, note=note)


def _find_shapes(feed: Feed, shapes: Shapes) -> tuple[list[Shape], list[FlatBatch]]:
    """The batches of an epoch that have a shape, each with it."""
    used = list[Shape]()
    batches = list[FlatBatch]()
    feed.set_epoch(1)
    for batch in feed:
        shape = shapes.shape_of(batch)
        if not isinstance(shape, str):
            used.append(shape)
            batches.append(batch)
    return used, batches


def _padding(lengths: NDArray[np.integer], most: int) -> float:
    """The sum of lengths that are each brought to the next of so many, the best; 1.0: as long."""
    sizes = np.array(choose_sizes(lengths, most))
    return float(sizes[np.searchsorted(sizes, lengths)].sum() / lengths.sum())
