"""Runs on words and their tags."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from flatout.data.batches.gather import TARGETS
from flatout.data.info import TextInfo
from flatout.data.tables.entities import NO_TAG
from flatout.data.text import TextDataConfig
from flatout.engine.optimizer import OptimConfig
from flatout.inference.tags import TagPredictor
from flatout.models.encoder.transformer import Outputs, Transformer
from flatout.run.kinds.kind import Answers, Feeds
from flatout.run.kinds.text import SPLIT_ROWS, TextKind, save_split_rows, tell_of_attention
from flatout.run.run_folder import RunFolder
from flatout.tasks.class_weights import ClassWeights
from flatout.tasks.tagging import Tagger, TagLabels
from flatout.tasks.task import Task

METRICS = ("f1", "precision", "recall", "macro_f1", "word_accuracy")
"""What a tagger is judged by, known before there is one."""

_TOKENS_A_PIECE = 1 << 22


class TagKind(TextKind):
    """Words to tags."""

    def __init__(self, config: TextDataConfig, data: TextInfo) -> None:
        self.config, self.data = config, data
        self.temperature = 1.0
        lost, rows = data.facts["tags"], data.facts["splits"]["train"]["rows"]
        kept = lost["train"]["words"] - lost["train"]["words_lost"]
        self.tag_labels = TagLabels(data.classes, max(1.0, kept / max(1, rows)), lost)

    @property
    def outputs(self) -> Outputs:
        return Outputs(self.tag_labels.names, "tags")

    def before_training(self, task: Task, feeds: Feeds, place: RunFolder) -> None:
        if place.is_first:
            save_split_rows(self.data.store, place.path / SPLIT_ROWS)
        tell_of_attention(task.model, feeds, place)
        for split, lost in self.tag_labels.lost.items():
            if lost["words_lost"]:
                entities = sum(lost["entities_lost"].values()) + len(lost["straddling"])
                place.log.say(
                    f"{split}: {lost['words_lost']:,} of {lost['words']:,} words lie beyond data.max_length;"
                    f" {entities:,} entities with them, which count as missed"
                )

    def build_task(self, model: nn.Module, task: Any, optim: OptimConfig, *, total_steps: int, seed: int) -> Task:
        if task.class_weights is ClassWeights.auto:
            self.tag_labels = replace(self.tag_labels, counts=self._tag_counts())
        return Tagger(model, task, optim, labels=self.tag_labels, total_steps=total_steps)

    def _tag_counts(self) -> list[int]:
        """Training words of each tag, a piece at a time."""
        targets = self.data.store.splits["train"].ragged(TARGETS).values
        counts = np.zeros(len(self.tag_labels.names), np.int64)
        for start in range(0, len(targets), _TOKENS_A_PIECE):
            piece = targets[start : start + _TOKENS_A_PIECE]
            counts += np.bincount(piece[piece != NO_TAG], minlength=len(counts))
        return [int(count) for count in counts]

    def after_best(self, task: Task, feeds: Feeds, place: RunFolder) -> None:
        """A temperature for the words' tags."""
        assert isinstance(task, Tagger)
        self._calibrate(task.answers(feeds.validation), place)

    def predictor(self, task: Task) -> Answers:
        assert isinstance(task.model, Transformer)
        return TagPredictor(
            model=task.model.eval(),
            vocabulary=self.encoder,
            names=self.tag_labels.names,
            max_length=self.config.max_length,
            roles=self.data.roles,
            temperature=self.temperature,
        )
