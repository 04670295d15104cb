"""Measure how much an encoding gives away, for the exposure report and `flatout compare`.

Everything is measured on records that took no part in training. There are three questions:

- How many of a record's 2-grams can be read off its encoding?
- How many known pairs of text and encoding does that take?
- How many texts can be rebuilt from the 2-grams, letter by letter?
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatout.bits.exposure_page import write_exposure
from flatout.bits.grams import FIELD_END
from flatout.bits.info import BitInfo
from flatout.bits.predictor import GramPredictor
from flatout.bits.reconstruct import Rates, Reconstructor, measure_rates
from flatout.bits.ridge import (
    COMMONEST,
    EVERYBODY,
    MOST_RECORDS,
    PENALTIES,
    GramSums,
    start_detectors,
)
from flatout.bits.scores import NAMES, GramMetrics
from flatout.bits.task import GramDecoder
from flatout.data.batches.feed import Feed, Feeds
from flatout.models.bit_mlp import BitMLP
from flatout.run_log import RunLog
from flatout.tasks.task import real_rows

Counts = NDArray[np.int64]
Rows = list[dict[str, Any]]
# Training records that hold a gram: grams between two of these bounds are gathered.
_FREQUENCIES = (*(1 << power for power in range(11)), 1 << 12, 1 << 14, 1 << 16, 1 << 40)
_GRAMS_SHOWN = 24  # that leak most, and as many that leak least
_LEAST_SUPPORT = 5  # judged records that hold a gram which is shown
_JUDGED = 10_000  # records, at most
_SIZES = 6  # of the learning curve: all records, a half, a quarter and so on
_FEWEST = 64  # records of its smallest size
# Shares of what there is to gain over guessing, below which the conclusion says hardly anything,
# some, and much.
_NOTHING = 0.1
_LITTLE = 0.35
_MUCH = 0.8


def count_grams(probabilities: Tensor, targets: Tensor, threshold: float) -> Counts:
    """`[3, C]`: in how many records each gram is there, is answered, and is both.

    `probabilities` and `targets` are `[N, C]`.
    """
    is_answered = probabilities >= threshold
    is_there = targets > 0
    masks = torch.stack([is_there, is_answered, is_answered & is_there])
    return masks.sum(1).cpu().numpy()


def dice_of(counts: Counts) -> NDArray[np.float64]:
    there, answered, found = counts
    return 2 * found / np.maximum(there + answered, 1)


def by_frequency(counts: Counts, train_counts: Counts) -> Rows:
    """Dice of grams, gathered by how many training records hold them."""
    rows = []
    is_judged = counts[0] > 0
    for low, high in pairwise((0, *_FREQUENCIES)):
        is_between = is_judged & (train_counts >= low) & (train_counts < high)
        num_grams = int(is_between.sum())
        if num_grams:
            dice = float(dice_of(counts[:, is_between].sum(1)))
            rows.append({"from": low, "to": high - 1, "grams": num_grams, "dice": dice})
    return rows


def most_and_least(names: tuple[str, ...], counts: Counts) -> tuple[Rows, Rows]:
    """The grams that leak most and least, among those some records hold."""
    num_records = counts[0]
    dice = dice_of(counts)
    grams = np.flatnonzero(num_records >= _LEAST_SUPPORT)
    by_dice = grams[np.lexsort((-num_records[grams], -dice[grams]))]
    rows: Rows = []
    for gram in by_dice.tolist():
        records = int(num_records[gram])
        rows.append({"gram": names[gram], "dice": float(dice[gram]), "records": records})
    return rows[:_GRAMS_SHOWN], rows[::-1][:_GRAMS_SHOWN]


def conclusion(dice: float, trivial: float, rates: Rates) -> list[str]:
    """What the numbers mean, in plain words."""
    gained = (dice - trivial) / max(1e-9, 1 - trivial)
    if gained < _NOTHING:
        first = (
            "Hardly anything more than common knowledge could be read off these encodings by this"
            " attack."
        )
    else:
        share = "Nearly all"
        if gained < _MUCH:
            share = "Some" if gained < _LITTLE else "Much"
        first = f"{share} of the plain text can be read off these encodings."
    return [
        (
            f"{first} Of an unseen record's 2-grams, a Dice of {dice:.3f} was reached; guessing the"
            f" commonest ones for everybody reaches {trivial:.3f}."
        ),
        (
            f"{rates.at_1:.1%} of {rates.num_records:,} unseen records were rebuilt letter by"
            f" letter at the first try, {rates.at_10:.1%} within ten; {rates.wrong:.1%} of the"
            " first tries were another text."
        ),
        (
            "This measures one attack: by one who knows the plain text of as many encoded records"
            " as were trained on. A low figure is no proof of safety against others."
        ),
    ]


class ExposureStudy:
    """What the encodings of unseen records give away to a trained model."""

    def __init__(self, task: GramDecoder, predictor: GramPredictor, feeds: Feeds) -> None:
        self.task = task
        self.predictor = predictor
        self.feeds = feeds
        self.labels = task.labels
        self.data: BitInfo = task.info
        self.judged, self.split = ("validation", "val") if feeds.test is None else ("test", "test")
        self.held: Feed = feeds.validation if feeds.test is None else feeds.test

    def measure(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Everything the report shows; `summary` holds the run's metrics and baselines."""
        rows, probabilities, detected, targets = self._answers()
        counts = count_grams(probabilities, targets, self.task.threshold)
        most, least = most_and_least(self.labels.names, counts)
        scores = {name: summary["metrics"][f"{self.split}/{name}"] for name in NAMES}
        baselines = summary["baseline"]["metrics"]
        trivial = baselines[f"{self.split}/{EVERYBODY}"]
        rebuilt = self._rebuilt(rows, detected)
        return {
            "schema": 1,
            "encoding": self.data.facts["about"],
            "source": self.data.source,
            "records": {
                "train": self.labels.num_rows,
                "judged": self.held.split.num_rows,
                "rebuilt": len(rows),
            },
            "scores": scores,
            "methods": {
                "this model": scores["dice"],
                "ridge regression": baselines[f"{self.split}/dice"],
                f"the {COMMONEST} commonest 2-grams for everybody": trivial,
            },
            "learning": list(self._learning_curve()),
            "frequency": by_frequency(counts, np.array(self.labels.counts)),
            "most": most,
            "least": least,
            "reconstruction": {"alone": asdict(rebuilt)},
            "conclusion": conclusion(scores["dice"], trivial, rebuilt),
        }

    @torch.inference_mode()
    def _answers(self) -> list[Tensor]:
        """Row numbers, probabilities, detected grams and targets of some thousand records."""
        self.task.eval()
        answers_of_batches: list[tuple[Tensor, ...]] = []
        model = self.task.model
        assert isinstance(model, BitMLP), "only a BitMLP detects hashed grams"
        for batch in self.held.all_rows():
            targets = batch.multi_hot(self.labels.num_outputs)
            answers = self.task.answers(batch).sigmoid()
            detected = model.detect(batch).float().sigmoid()
            of_batch = (batch.rows, answers, detected, targets)
            answers_of_batches.append(tuple(real_rows(values, batch).cpu() for values in of_batch))
            if sum(len(rows) for rows, *_ in answers_of_batches) >= _JUDGED:
                break
        return [torch.cat(parts)[:_JUDGED] for parts in zip(*answers_of_batches, strict=True)]

    def _learning_curve(self) -> Iterator[dict[str, float]]:
        """Dice when 64, 128, … and all pairs of text and encoding are known, of ridge and network.

        Only what has a closed form is solved again for each number: ridge, and the detectors of a
        network that does not train them.
        """
        train = self.feeds.train
        model = copy.deepcopy(self.task.model)
        assert isinstance(model, BitMLP)
        total = min(train.split.num_rows, MOST_RECORDS)
        sizes = sorted({min(total, max(_FEWEST, total >> halvings)) for halvings in range(_SIZES)})
        sums = GramSums(self.data, self.labels, train.device)
        refits = (
            model.detectors is not None and model.starts_at_ridge and not model.trains_detectors
        )
        penalties: tuple[float, ...] = PENALTIES
        for size in sums.read(train, sizes):
            answers, hashed = sums.best(self.feeds.validation, self.labels.parts, penalties)
            # The best penalty moves little when pairs double, so its neighbours are enough to try.
            penalties = tuple(sorted({*answers.penalties_near(), *hashed.penalties_near()}))
            metrics = GramMetrics(answers.threshold)
            for inputs_ND, grams_NG in sums.blocks(self.held):
                metrics.update(answers.scores(inputs_ND), grams_NG[:, : self.labels.num_outputs])
            point = {"records": float(size), "ridge": metrics.compute()["dice"]}
            if refits:
                start_detectors(model, hashed)
                point["model"] = self._model_dice(model)
            yield point

    @torch.inference_mode()
    def _model_dice(self, model: BitMLP) -> float:
        model.eval()
        metrics = GramMetrics()
        num_labels = self.labels.num_outputs
        # The validation records choose the threshold, at which the held records are then scored.
        for feed in (self.feeds.validation, self.held):
            metrics.reset()
            for batch in feed.all_rows():
                probabilities = model(batch)[:, :num_labels].float().sigmoid()
                metrics.update(probabilities, batch.multi_hot(num_labels))
            values = metrics.compute()
            metrics.fixed_threshold = metrics.threshold
        return values["dice"]

    def _rebuilt(self, rows: Tensor, detected: Tensor) -> Rates:
        texts = self.data.texts(self.judged).take(pa.array(rows.numpy()))
        truth = pc.replace_substring(texts, FIELD_END, "").to_pylist()
        reconstructor = Reconstructor(self.labels.hashed, self.predictor.order)
        return measure_rates(list(reconstructor.candidates(detected.numpy())), truth)


def report_exposure(
    task: GramDecoder,
    predictor: GramPredictor,
    feeds: Feeds,
    summary: dict[str, Any],
    folder: Path,
    log: RunLog,
) -> None:
    """Write `exposure.html` and `exposure.json`, and report their conclusion."""
    if not task.config.exposure:
        return
    if not isinstance(task.model, BitMLP) or task.model.detectors is None:
        log.say("exposure.html is not written: a model without detectors rebuilds no texts")
        return
    task.to(feeds.validation.device)
    exposure = ExposureStudy(task, predictor, feeds).measure(summary)
    write_exposure(folder, exposure)
    for line in exposure["conclusion"]:
        log.say(line)
