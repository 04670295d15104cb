"""Runs on bit strings: ridge regression first, then a network that starts where ridge stands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from torch import nn

from flatout.bits.columns import Form
from flatout.bits.data import BitsDataConfig
from flatout.bits.exposure_page import write_exposure
from flatout.bits.exposure_study import COMMONEST, EVERYBODY, ExposureStudy
from flatout.bits.grams import FIELD_END, LABELS, GramIndex
from flatout.bits.info import BitInfo, GramLabels
from flatout.bits.predictor import GramPredictor
from flatout.bits.recombine import recombined_texts
from flatout.bits.reconstruct import LetterOrder
from flatout.bits.ridge import PENALTIES, Ridge, RidgeSums
from flatout.bits.scores import GramMetrics
from flatout.bits.targets import targets_of
from flatout.bits.task import GramDecoder, Recombined
from flatout.data.batches.feed import Feed
from flatout.engine.optimizer import OptimConfig
from flatout.models.bit_mlp import BitMLP
from flatout.run.kinds.kind import Feeds, Kind
from flatout.run.run_folder import RunFolder
from flatout.tasks.task import Task

_STEEPNESS = 15.0
"""Logits of a detector for each unit of ridge's score, which is 0 for an absent gram and 1 for a present one."""
_RECOMBINED, _TEXTS_READ = 65_536, 131_072
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


class BitsKind(Kind):
    """Encodings to 2-grams."""

    data: BitInfo
    counts_tokens = False

    def __init__(self, config: BitsDataConfig, data: BitInfo) -> None:
        self.config, self.data = config, data
        facts = data.facts
        rows = facts["splits"]["train"]["rows"]
        self.labels = GramLabels(LABELS, data.hashed, facts["class_counts"], rows)
        self.seed = 0
        self._learnt: LetterOrder | None = None

    def build_model(self, model: Any, place: RunFolder) -> nn.Module:
        return model.build(
            num_inputs=self.data.num_inputs,
            is_set=self.data.is_set,
            hashed_of_label=self.labels.hashed_of_label(),
            num_hashed=len(self.labels.hashed),
        )

    def build_task(self, model: nn.Module, task: Any, optim: OptimConfig, *, total_steps: int, seed: int) -> Task:
        self.seed = seed
        return GramDecoder(model, task, optim, labels=self.labels, total_steps=total_steps)

    def before_training(self, task: Task, feeds: Feeds, place: RunFolder) -> None:
        """Ridge regression: the baseline, and where the model's detectors start."""
        assert isinstance(task, GramDecoder)
        data, num_labels, num_targets = self.data, self.labels.num_outputs, self.labels.num_targets
        device = feeds.train.device
        sums = RidgeSums(num_inputs=data.num_inputs, is_set=data.is_set, num_grams=num_targets, device=device)
        next(sums.read(feeds.train))
        baseline, hashed = sums.best(feeds.validation, (slice(0, num_labels), slice(num_labels, num_targets)))
        place.summary.set("baseline", {"name": "ridge regression", "metrics": self._baselines(sums, baseline, feeds)})
        evidence = f"Dice {baseline.dice:.4f} on the validation records, from {baseline.num_records:,} records"
        place.choose(
            "ridge penalty", baseline.penalty, f"the best of {', '.join(f'{p:g}' for p in PENALTIES)}", evidence
        )
        model = task.model
        if not isinstance(model, BitMLP):
            return
        if model.ridge is not None:
            model.take_ridge(baseline.weight, baseline.bias + (0.5 - baseline.threshold))
        if model.detectors is not None:
            if model.starts_at_ridge:
                model.start_detectors(_STEEPNESS * hashed.weight, _STEEPNESS * (hashed.bias - hashed.threshold))
                evidence = f"Dice {hashed.dice:.4f} of the hashed grams on the validation records"
                place.choose("detectors", "ridge", "read off in closed form", evidence)
            if task.config.recombine:
                task.recombined.append(self._recombined(device, self.seed + feeds.train.plan.rank))
                evidence = f"fields of {min(_TEXTS_READ, self.labels.num_rows):,} training texts, put together anew"
                value = f"{task.config.recombine:g} a record"
                place.choose("recombined texts", value, "they teach the composer without an encoding", evidence)

    def before_probe(self, task: Task, feeds: Feeds) -> None:
        """Detectors are as fast wherever they start; texts put together anew take part in each step."""
        assert isinstance(task, GramDecoder)
        if task.config.recombine and isinstance(task.model, BitMLP) and task.model.detectors is not None:
            task.recombined.append(self._recombined(feeds.train.device, self.seed))

    def after_best(self, task: Task, feeds: Feeds, place: RunFolder) -> None:
        """How large a vote ridge regression gets, by the validation records."""
        assert isinstance(task, GramDecoder)
        model = task.model
        task.is_finished = True
        if not isinstance(model, BitMLP) or model.ridge is None:
            return
        found = {share: self._dice_with(share, task, feeds.validation) for share in _SHARES}
        best = max(_SHARES, key=lambda share: found[share])  # the smallest of equals
        model.ridge_share.fill_(best)
        evidence = ", ".join(f"{share:g}: {dice:.4f}" for share, dice in found.items())
        place.choose("ridge's vote", best, "best Dice on the validation records", evidence)

    @torch.inference_mode()
    def _dice_with(self, share: float, task: GramDecoder, validation: Feed) -> float:
        assert isinstance(task.model, BitMLP)
        task.eval()
        task.model.ridge_share.fill_(share)
        metrics = GramMetrics(is_alone=True)
        for batch in validation.afresh():
            targets = batch.multi_hot(self.labels.num_outputs)
            metrics.update(task.answers(batch).sigmoid(), targets)
        return metrics.compute()["dice"]

    def _baselines(self, sums: RidgeSums, ridge: Ridge, feeds: Feeds) -> dict[str, float]:
        """Ridge and the commonest grams for everybody, on the validation and the test records."""
        commonest = torch.tensor(self.labels.counts).argsort(descending=True)[:COMMONEST]
        everybody = torch.zeros(self.labels.num_outputs)
        everybody[commonest] = 1.0
        found: dict[str, float] = {}
        for split, feed in (("val", feeds.validation), ("test", feeds.test)):
            if feed is None:
                continue
            by_ridge, by_all = GramMetrics(ridge.threshold, is_alone=True), GramMetrics(0.5, is_alone=True)
            for inputs_ND, grams_NG in sums.blocks(feed):
                targets = grams_NG[:, : self.labels.num_outputs]
                by_ridge.update(ridge.scores(inputs_ND), targets)
                by_all.update(everybody.to(targets.device).expand(len(targets), -1), targets)
            found |= {f"{split}/{name}": value for name, value in by_ridge.compute().items()}
            found[f"{split}/{EVERYBODY}"] = by_all.compute()["dice"]
        return found

    def after_training(self, task: Task, feeds: Feeds, place: RunFolder) -> None:
        """The exposure report: what encodings give away of records that took no part in training."""
        assert isinstance(task, GramDecoder)
        if not task.config.exposure:
            return
        if not isinstance(task.model, BitMLP) or task.model.detectors is None:
            place.log.say("exposure.html is not written: a model without detectors rebuilds no texts")
            return
        task.to(feeds.validation.device)
        study = ExposureStudy(self.data, self.labels, task, self.predictor(task), feeds)
        exposure = study.measure(place.summary.values, steepness=_STEEPNESS)
        write_exposure(place.path, exposure)
        for line in exposure["conclusion"]:
            place.log.say(line)

    def _recombined(self, device: torch.device, seed: int) -> Recombined:
        """Texts of people that nobody knows, made of the training records' fields."""
        texts = self.data.texts("train").slice(0, _TEXTS_READ)
        index = GramIndex(self.labels.hashed, is_frozen=True)
        ids, lengths = targets_of(recombined_texts(texts, _RECOMBINED, seed), index)
        offsets = torch.from_numpy(np.append(0, np.cumsum(lengths, dtype=np.int64)))
        return Recombined(torch.from_numpy(ids).to(device), offsets.to(device), self.labels.num_targets)

    def predictor(self, task: Task) -> GramPredictor:
        assert isinstance(task, GramDecoder)
        facts = self.data.facts
        return GramPredictor(
            model=task.model.eval(),
            labels=self.labels,
            num_inputs=self.data.num_inputs,
            threshold=task.threshold,
            numbers=np.array(facts["numbers"], dtype=np.int64) if self.data.is_set else None,
            bits_column=facts["bits_column"],
            text_columns=facts["columns"],
            form=Form(facts["form"]),
            order=self._order(),
        )

    def _order(self) -> LetterOrder:
        """What the training texts look like; learnt once."""
        if self._learnt is None:
            texts = pc.replace_substring(self.data.texts("train").slice(0, _TEXTS_READ), FIELD_END, "")
            self._learnt = LetterOrder.learn(texts, self.labels.hashed)
        return self._learnt
