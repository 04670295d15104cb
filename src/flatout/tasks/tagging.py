"""Words to tags: a class for the first token of each word, entities scored as wholes.

An entity counts when its first word, its last word and its type are all right. What lies beyond the
longest row was never seen by the model; its entities count as missed, as they would where the model
is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from flatout.data.batches.feed import Feed, Feeds
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.gather import TOKENS
from flatout.data.checks.tags import find_entities
from flatout.data.info import NO_TAG, TagLabels
from flatout.errors import require
from flatout.models.encoder.transformer import Outputs
from flatout.run_log import RunLog
from flatout.tasks.calibration import calibrated
from flatout.tasks.class_weights import ClassWeights, NamedClassesConfig, balanced, named
from flatout.tasks.metrics import class_rows, mean_where
from flatout.tasks.networks import build_text_network, require_no_windows
from flatout.tasks.score_intervals import Interval, OverRanks, RowSums, bootstrap
from flatout.tasks.task import SPLITS, Task, real_rows, real_tokens

Integers = NDArray[np.integer]
METRICS = ("f1", "precision", "recall", "macro_f1", "word_accuracy")  # what a tagger is judged by


@dataclass(kw_only=True, slots=True)
class TaggingConfig(NamedClassesConfig):
    """The loss of a tagger."""


class Tagger(Task):
    """Trains a tagger on flat batches."""

    settings = TaggingConfig
    metric_names = METRICS
    labels_are_of_tokens = True
    temperature = 1.0
    weights_C: Tensor | None

    def take_labels(self, labels: TagLabels) -> None:
        self.labels = labels
        self.scores = EntityScores(labels.types)
        self._lost: dict[str, Any] = {}
        is_auto = self.config.class_weights is ClassWeights.auto
        weights = balanced(labels.counts) if is_auto else named(self.config.weights, labels.names)
        self.register_buffer("weights_C", weights, persistent=False)

    def take_info(self, info: Any) -> None:
        require(
            isinstance(getattr(info, "labels", None), TagLabels),
            "Tagger",
            f"{type(info).__name__} has no tags",
            hint="Use Classifier for classes and GramDecoder for bit strings.",
        )
        require_no_windows(self, info)
        needs_counts = self.config.class_weights is ClassWeights.auto
        self.take_labels(
            replace(info.labels, counts=info.count_tags()) if needs_counts else info.labels
        )

    def build_model(self, config: Any, info: Any) -> nn.Module:
        return build_text_network(config, info, Outputs(self.labels.names, "tags"))

    def intervals(self) -> dict[str, Interval]:
        return self.scores.intervals()

    def per_class(self) -> list[dict[str, Any]]:
        return self.scores.per_type()

    def loss(self, outputs: Tensor, batch: FlatBatch) -> Tensor:
        return self._loss_sum_of(*_real(outputs, batch)) / (
            batch.step_rows * self.labels.words_per_row
        )

    def judge(self, batch: FlatBatch) -> Tensor:
        outputs, targets = _real(self.outputs(batch), batch)
        answers = outputs.argmax(-1).cpu().numpy()
        tags = targets.cpu().numpy()
        is_word = tags != NO_TAG
        ends = np.cumsum(batch.lengths[: batch.num_real].numpy())
        offsets = np.append(0, np.cumsum(is_word)[ends - 1])
        rows = batch.rows[: batch.num_real]
        cut = np.isin(rows.numpy(), self._lost.get("straddling", []))
        self.scores.add(answers[is_word], tags[is_word], offsets, cut, rows)
        return self._loss_sum_of(outputs, targets) / self.labels.words_per_row

    def prepare_training(self, feeds: Feeds, log: RunLog, seed: int) -> dict[str, Any]:
        for split, lost in self.labels.lost.items():
            if lost["words_lost"]:
                entities = sum(lost["entities_lost"].values()) + len(lost["straddling"])
                words = (
                    f"{lost['words_lost']:,} of {lost['words']:,} words lie beyond data.max_length"
                )
                log.say(f"{split}: {words}; {entities:,} entities with them, which count as missed")
        return {}

    def tune_answers(self, feeds: Feeds, log: RunLog) -> dict[str, Any]:
        """A temperature for the words' tags."""
        found = calibrated(*self.answers(feeds.validation))
        self.temperature = found.temperature
        return found.report(log)

    def answers(self, feed: Feed) -> list[Tensor]:
        """Outputs, tags and rows of the words of some rows of a feed, on the host."""

        def of_words(batch: FlatBatch) -> tuple[Tensor, ...]:
            outputs, tags = _real(self.outputs(batch), batch)
            rows = batch.rows[: batch.num_real].repeat_interleave(batch.lengths[: batch.num_real])
            is_word = tags != NO_TAG
            return outputs[is_word].float(), tags[is_word].long(), rows[is_word.cpu()]

        return self.gathered(
            feed, of_words, most=100_000, in_all=int(feed.split.lengths(TOKENS).sum())
        )

    def answer(self, batch: FlatBatch) -> dict[str, Tensor]:
        """The tag of each token, of which a word's first counts, and the tokens of each row."""
        return {
            "tags": real_tokens(self.outputs(batch), batch).argmax(-1),
            "lengths": real_rows(batch.lengths, batch),
        }

    def start_judging(self, split: str) -> None:
        self._lost = self.labels.lost.get(SPLITS[split], {})
        self.scores.restart(self._lost.get("entities_lost", {}), self._lost.get("words_lost", 0))

    def judged(self) -> dict[str, float]:
        return self.scores.values(self.over_ranks)

    def _loss_sum_of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        how = {"ignore_index": NO_TAG, "label_smoothing": self.config.label_smoothing}
        return F.cross_entropy(
            outputs.float(), targets.long(), weight=self.weights_C, reduction="sum", **how
        )


def _real(outputs: Tensor, batch: FlatBatch) -> tuple[Tensor, Tensor]:
    assert batch.targets is not None
    return real_tokens(outputs, batch), real_tokens(batch.targets, batch)


class EntityScores:
    """Entities that were marked, found, and right, by type."""

    def __init__(self, types: list[str]) -> None:
        self.types = types
        self.restart({}, 0)

    def restart(self, entities_lost: dict[str, int], words_lost: int) -> None:
        """Forget all; what was cut off is marked and can never be found."""
        self.sums = RowSums(3 * (len(self.types) + 1))
        """What each row adds: entities given, found and right by type, then none, right words, and
        words."""
        self._whole: Tensor | None = None
        lost = [entities_lost.get(name, 0) for name in self.types]
        self._lost = torch.tensor(
            [[*lost, 0], [0] * (len(lost) + 1), [0] * len(lost) + [words_lost]]
        ).double()

    def add(
        self,
        answers: Integers,
        tags: Integers,
        offsets: Integers,
        cut: NDArray[np.bool_],
        rows: Tensor | None = None,
    ) -> None:
        """Take in words of rows: answered and given tags, the rows whose last entity was cut in
        two, their numbers.
        """
        rows = torch.arange(len(cut)) if rows is None else rows
        given, found = find_entities(tags, offsets), find_entities(answers, offsets)
        # The last entity of a row that was cut in two is longer than anything that can be found.
        is_last = np.append(given.row[1:] != given.row[:-1], True)[: len(given.row)]
        is_right = np.isin(
            replace(given, stop=given.stop + (is_last & cut[given.row])).keys(), found.keys()
        )
        row_of_word = np.repeat(np.arange(len(rows)), np.diff(offsets))
        none = len(self.types)
        width = len(self.types) + 1
        counted = (
            (given.row, given.kind),
            (found.row, found.kind + width),
            (given.row[is_right], given.kind[is_right] + 2 * width),
            (row_of_word[answers == tags], none + width),
            (row_of_word, none + 2 * width),
        )
        for numbers, places in counted:
            at = torch.from_numpy(np.broadcast_to(places, len(numbers)).astype(np.int64)).unsqueeze(
                1
            )
            self.sums.add(rows[torch.from_numpy(numbers)], torch.ones_like(at), at)

    def values(self, over_ranks: OverRanks | None = None) -> dict[str, float]:
        """The metrics of all words, over all ranks, which must ask at once; what is asked for
        afterwards is of them.
        """
        self._whole = self.sums.gathered(over_ranks)
        return {
            name: float(value) for name, value in self._values_of(self._columns().flatten()).items()
        }

    def intervals(self) -> dict[str, Interval]:
        """The 95 % interval of each metric; what was cut off counts in every resample."""
        return bootstrap(self._of_rows(), lambda sums: self._values_of(sums + self._lost.flatten()))

    def per_type(self) -> list[dict[str, Any]]:
        """Precision, recall and F1 of each type, the commonest first."""
        given, found, right = self._columns()[:, :-1]
        return class_rows(self.types, right, given, found)

    def _values_of(self, sums: Tensor) -> dict[str, Tensor]:
        """The metrics of `[…, S]` sums over rows."""
        columns = sums.unflatten(-1, (3, -1))
        given, found, right = columns[..., :-1].unbind(-2)
        _, right_words, words = columns[..., -1].unbind(-1)
        all_given = given.sum(-1)
        all_found = found.sum(-1)
        all_right = right.sum(-1)
        return {
            "f1": 2 * all_right / (all_given + all_found).clamp(min=1),
            "precision": all_right / all_found.clamp(min=1),
            "recall": all_right / all_given.clamp(min=1),
            "macro_f1": mean_where(2 * right / (given + found).clamp(min=1), given + found > 0),
            "word_accuracy": right_words / words.clamp(min=1),
        }

    def _of_rows(self) -> Tensor:
        return self.sums.gathered() if self._whole is None else self._whole

    def _columns(self) -> Tensor:
        """The sums of all rows, with what was cut off among what was given."""
        return self._of_rows().sum(0).unflatten(0, (3, -1)) + self._lost
