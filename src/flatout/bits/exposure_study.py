"""The exposure report's numbers, gathered from a finished run on bit strings."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from flatout.bits.exposure import (
    LearningCurve,
    by_frequency,
    conclusion,
    count_grams,
    most_and_least,
)
from flatout.bits.grams import FIELD_END
from flatout.bits.info import BitInfo, GramLabels
from flatout.bits.predictor import GramPredictor
from flatout.bits.reconstruct import Rates, rates
from flatout.bits.ridge_start import COMMONEST, EVERYBODY
from flatout.bits.scores import NAMES
from flatout.bits.task import GramDecoder
from flatout.data.batches.feed import Feed, Feeds
from flatout.models.bit_mlp import BitMLP
from flatout.tasks.task import real_rows

_JUDGED = 10_000
_MOST_NAMES, _TEXTS_READ = 20_000, 131_072


class ExposureStudy:
    """What the encodings of unseen records give away to a trained model."""

    def __init__(
        self, data: BitInfo, labels: GramLabels, task: GramDecoder, predictor: GramPredictor, feeds: Feeds
    ) -> None:
        self.data, self.labels, self.task, self.predictor, self.feeds = data, labels, task, predictor, feeds
        self.judged, self.split = ("validation", "val") if feeds.test is None else ("test", "test")
        self.held: Feed = feeds.validation if feeds.test is None else feeds.test

    def measure(self, summary: dict[str, Any], *, steepness: float) -> dict[str, Any]:
        """Everything the report shows; `summary` holds the run's metrics and baselines."""
        rows, probabilities, detected, targets = self._answers()
        counts = count_grams(probabilities, targets, self.task.threshold)
        most, least = most_and_least(self.labels.names, counts)
        scores = {name: summary["metrics"][f"{self.split}/{name}"] for name in NAMES}
        baselines = summary["baseline"]["metrics"]
        trivial = baselines[f"{self.split}/{EVERYBODY}"]
        alone, with_names = self._rebuilt(rows, detected)
        curve = LearningCurve(
            self.task.model,
            num_inputs=self.data.num_inputs,
            is_set=self.data.is_set,
            num_labels=self.labels.num_outputs,
            num_targets=self.labels.num_targets,
        )
        return {
            "schema": 1,
            "encoding": self.data.facts["about"],
            "source": self.data.source,
            "records": {"train": self.labels.num_rows, "judged": self.held.split.num_rows, "rebuilt": len(rows)},
            "scores": scores,
            "methods": {
                "this model": scores["dice"],
                "ridge regression": baselines[f"{self.split}/dice"],
                f"the {COMMONEST} commonest 2-grams for everybody": trivial,
            },
            "learning": list(curve.points(self.feeds.train, self.feeds.validation, self.held, steepness)),
            "frequency": by_frequency(counts, np.array(self.labels.counts)),
            "most": most,
            "least": least,
            "reconstruction": {"alone": asdict(alone), "with_names": with_names and asdict(with_names)},
            "conclusion": conclusion(scores["dice"], trivial, alone, with_names),
        }

    @torch.inference_mode()
    def _answers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Row numbers, probabilities, detected grams and targets of some thousand records, on the host."""
        self.task.eval()
        found: list[tuple[Tensor, ...]] = []
        model = self.task.model
        assert isinstance(model, BitMLP), "only a BitMLP detects hashed grams"
        for batch in self.held.afresh():
            targets = batch.multi_hot(self.labels.num_outputs)
            answers, detected = self.task.answers(batch).sigmoid(), model.detect(batch).float().sigmoid()
            found.append(tuple(real_rows(values, batch).cpu() for values in (batch.rows, answers, detected, targets)))
            if sum(len(rows) for rows, *_ in found) >= _JUDGED:
                break
        rows, answers, detected, targets = (torch.cat(parts)[:_JUDGED] for parts in zip(*found, strict=True))
        return rows, answers, detected, targets

    def _rebuilt(self, rows: Tensor, detected: Tensor) -> tuple[Rates, Rates | None]:
        """How often texts are rebuilt, from the grams alone and with the names of the training records."""
        texts = self.data.texts(self.judged).take(pa.array(rows.numpy()))
        truth = pc.replace_substring(texts, FIELD_END, "").to_pylist()
        found = detected.numpy()
        alone = rates(list(self.predictor.reconstructor().candidates(found)), truth)
        names = self._names()
        if not names:
            return alone, None
        return alone, rates(list(self.predictor.reconstructor(names).candidates(found)), truth)

    def _names(self) -> list[str]:
        """Fields of the training records that are nothing but letters, the commonest first."""
        fields = pc.split_pattern(self.data.texts("train").slice(0, _TEXTS_READ), FIELD_END).flatten()
        counted = pc.value_counts(fields.filter(pc.utf8_is_alpha(fields)))
        order = pc.sort_indices(counted.field("counts"), sort_keys=[("", "descending")])
        return counted.field("values").take(order[:_MOST_NAMES]).to_pylist()
