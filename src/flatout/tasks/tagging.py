"""Words to tags: `Tagger` trains a network, `EntityScores` judges it by whole entities.

The first token of each word carries the word's tag; other tokens have none. An entity counts when
its first word, its last word and its type are all right. Words beyond the longest row were never
seen by the model. Their entities count as missed, as they would where the model is used.

    tags      B-PER I-PER O     B-LOC      2 entities in the data
    answers   B-PER I-PER B-LOC B-LOC      3 found, 2 right: precision 2/3, recall 1, F1 0.8

Of plain tags, such as parts of speech, each word is an entity by itself: F1, precision and recall
are the accuracy.

Metrics are made of sums over rows, so that a bootstrap can draw rows.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from flatout.data.info import DataInfo, TagInfo, TagLabels
from flatout.data.problem import NO_TAG
from flatout.data.ragged import row_bounds
from flatout.errors import UserError
from flatout.models.contract import ModelConfig
from flatout.models.encoder.transformer import Outputs
from flatout.run_log import RunLog
from flatout.tasks.abstention import HeldOutAnswers, WordAnswers
from flatout.tasks.calibration import calibrated
from flatout.tasks.class_weights import ClassWeights, NamedClassesConfig, balanced, named
from flatout.tasks.metrics import class_rows, mean_where
from flatout.tasks.networks import build_text_network, require_no_windows
from flatout.tasks.score_intervals import Interval, OverRanks, RowSums, bootstrap
from flatout.tasks.task import SPLITS, Task, real_rows, real_tokens

Integers = NDArray[np.integer]
METRICS = ("f1", "precision", "recall", "macro_f1", "word_accuracy")
_MOST_WORDS = 100_000  # to find a temperature by


@dataclass(kw_only=True, slots=True)
class TaggingConfig(NamedClassesConfig):
    """The loss of a tagger."""


class Tagger(Task[TagLabels]):
    """Trains a tagger on flat batches."""

    settings = TaggingConfig
    metric_names = METRICS
    labels_are_of_tokens = True
    leaves_out_unlabelled = True
    temperature = 1.0
    weights_C: Tensor | None

    def take_labels(self, labels: TagLabels) -> None:
        self.labels = labels
        self.scores = EntityScores(labels.types, is_plain=labels.are_plain)
        self._lost: Mapping[str, Any] = {}  # what was cut off in the split that is judged
        is_auto = self.config.class_weights is ClassWeights.auto
        weights = balanced(labels.counts) if is_auto else named(self.config.weights, labels.names)
        self.register_buffer("weights_C", weights, persistent=False)

    def take_info(self, info: DataInfo) -> None:
        if not isinstance(info, TagInfo):
            raise UserError(
                "Tagger",
                f"{type(info).__name__} has no tags",
                hint="Use Classifier for classes and GramDecoder for bit strings.",
            )
        if self.is_built:
            require_no_windows(info)
        labels = info.labels
        if self.config.class_weights is ClassWeights.auto:
            labels = replace(labels, counts=info.count_tags())
        self.take_labels(labels)

    def build_model(self, config: ModelConfig, info: DataInfo) -> nn.Module:
        return build_text_network(config, info, Outputs(self.labels.names, "tags"))

    def intervals(self) -> dict[str, Interval]:
        return self.scores.intervals()

    def per_class(self) -> list[dict[str, Any]]:
        return self.scores.per_type()

    def loss(self, outputs: Tensor, batch: FlatBatch) -> Tensor:
        loss_sum = self.sum_losses(*_real(outputs, batch))
        return loss_sum / (batch.step_rows * self.labels.words_per_row)

    def judge(self, batch: FlatBatch) -> Tensor:
        outputs, targets = _real(self.outputs(batch), batch)
        answers = outputs.argmax(-1).cpu().numpy()
        tags = targets.cpu().numpy()
        is_word = tags != NO_TAG
        # Rows of 3 and 2 tokens, of which 2 and 1 begin words: ends [3, 5], words so far
        # [1, 1, 2, 3, 3], offsets of words [0, 2, 3].
        ends = np.cumsum(batch.lengths[: batch.num_real].numpy())
        offsets = np.append(0, np.cumsum(is_word)[ends - 1])
        rows = batch.rows[: batch.num_real]
        is_cut = np.isin(rows.numpy(), self._lost.get("straddling", []))
        drawn = self.kept_rows(batch)
        self.scores.add(
            answers[is_word], tags[is_word], offsets, is_cut, rows if drawn is None else drawn
        )
        if self.own_metrics:
            has_tag = targets != NO_TAG
            self.add_answers(outputs[has_tag].float(), targets[has_tag].long())
        return self.sum_losses(outputs, targets) / self.labels.words_per_row

    def prepare_training(self, feeds: Feeds, log: RunLog, seed: int) -> dict[str, Any]:
        for split, lost in self.labels.lost.items():
            if not lost["words_lost"]:
                continue
            entities = sum(lost["entities_lost"].values()) + len(lost["straddling"])
            counts = f"{lost['words_lost']:,} of {lost['words']:,}"
            log.say(
                f"{split}: {counts} words lie beyond data.max_length; {entities:,} entities with"
                " them, which count as missed"
            )
        return {}

    def tune_answers(self, feeds: Feeds, log: RunLog) -> dict[str, Any]:
        """Choose a temperature by the validation words' tags."""
        outputs, tags, rows = self.answers(feeds.validation)
        calibration = calibrated(outputs, tags, rows)
        self.temperature = calibration.temperature
        counts = rows.unique_consecutive(return_counts=True)[1].numpy()
        shares = (outputs / self.temperature).softmax(-1)
        answers = WordAnswers.of_tags(shares, row_bounds(counts), is_plain=self.labels.are_plain)
        self.held_out = HeldOutAnswers.of_words(answers, tags.numpy())
        return calibration.report(log)

    def answers(self, feed: Feed) -> list[Tensor]:
        """Outputs, tags and row numbers of words in a feed's rows, on the host."""

        def select_words(batch: FlatBatch) -> tuple[Tensor, ...]:
            outputs, tags = _real(self.outputs(batch), batch)
            rows = batch.rows[: batch.num_real].repeat_interleave(batch.lengths[: batch.num_real])
            is_word = tags != NO_TAG
            return outputs[is_word].float(), tags[is_word].long(), rows[is_word.cpu()]

        num_tokens = int(feed.split.lengths(TOKENS).sum())
        return self.gathered(feed, select_words, most=_MOST_WORDS, in_all=num_tokens)

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

    def sum_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses of some words, from the outputs of all tokens; override it for another
        loss.

        A token that begins no word has the target NO_TAG.
        """
        return F.cross_entropy(
            outputs.float(),
            targets.long(),
            weight=self.weights_C,
            reduction="sum",
            ignore_index=NO_TAG,
            label_smoothing=self.config.label_smoothing,
        )


def _real(outputs: Tensor, batch: FlatBatch) -> tuple[Tensor, Tensor]:
    """The outputs and tags of a batch's own tokens, without those of rows that fill it up."""
    assert batch.targets is not None
    return real_tokens(outputs, batch), real_tokens(batch.targets, batch)


class EntityScores:
    """Counts of entities by type: those in the data, those found, and those right.

    `_whole` and `sums` hold a table of three blocks for each row, flattened. The first `types`
    columns of a block are types; the last counts words:

        in the data   entities of type 0, 1, ...   0
        found         entities of type 0, 1, ...   words with the right tag
        right         entities of type 0, 1, ...   words
    """

    def __init__(self, types: list[str], *, is_plain: bool = False) -> None:
        """`is_plain`: whether each word counts by itself, with its tag as its type."""
        self.types = types
        self.is_plain = is_plain
        self.restart({}, 0)

    def restart(self, entities_lost: dict[str, int], words_lost: int) -> None:
        """Forget all rows.

        `entities_lost` by type and `words_lost` were cut off: they count, and can never be found.
        """
        width = len(self.types) + 1
        self.sums = RowSums(3 * width)  # what each row of this rank adds
        self._whole: Tensor | None = None  # the rows of all ranks
        lost_counts = [entities_lost.get(name, 0) for name in self.types]
        lost_in_data = [*lost_counts, 0]
        lost_right = [0] * len(self.types) + [words_lost]
        self._lost = torch.tensor([lost_in_data, [0] * width, lost_right]).double()

    def add(
        self,
        answers: Integers,
        tags: Integers,
        offsets: Integers,
        is_cut: NDArray[np.bool_],
        rows: Tensor | None = None,
    ) -> None:
        """Count the words and entities of some rows.

        `answers` and `tags` are those of all words, row after row; `offsets` say where the words of
        each row begin. `is_cut`: whether a row's last entity continues beyond the longest row.
        `rows`: the numbers of the rows in their split.
        """
        rows = torch.arange(len(is_cut)) if rows is None else rows
        marked = find_entities(tags, offsets, is_plain=self.is_plain)
        found = find_entities(answers, offsets, is_plain=self.is_plain)
        # The last entity of a row that was cut is longer than anything that can be found there, so
        # its end is moved by one.
        is_last = np.append(marked.row[1:] != marked.row[:-1], True)[: len(marked.row)]
        true_stop = marked.stop + (is_last & is_cut[marked.row])
        is_right = np.isin(replace(marked, stop=true_stop).keys(), found.keys())
        row_of_word = np.repeat(np.arange(len(rows)), np.diff(offsets))
        words = len(self.types)  # the column of words in a block
        width = words + 1
        self._count(rows, marked.row, marked.kind)
        self._count(rows, found.row, found.kind + width)
        self._count(rows, marked.row[is_right], marked.kind[is_right] + 2 * width)
        self._count(rows, row_of_word[answers == tags], words + width)
        self._count(rows, row_of_word, words + 2 * width)

    def _count(self, rows: Tensor, numbers: Integers, columns: Integers | int) -> None:
        """Add 1 to these columns of the rows `rows[numbers]`; a single column is that of all."""
        all_columns = np.broadcast_to(columns, len(numbers)).astype(np.int64)
        places = torch.from_numpy(all_columns).unsqueeze(1)
        self.sums.add(rows[torch.from_numpy(numbers)], torch.ones_like(places), places)

    def values(self, over_ranks: OverRanks | None = None) -> dict[str, float]:
        """The metrics over the rows of all ranks, which must all call this at the same time.

        `intervals` and `per_type` are of these rows afterwards.
        """
        self._whole = self.sums.gathered(over_ranks)
        values = self._values_of(self._columns().flatten())
        return {name: float(value) for name, value in values.items()}

    def intervals(self) -> dict[str, Interval]:
        """The 95 % interval of each metric; what was cut off counts in every resample."""
        return bootstrap(self._of_rows(), lambda sums: self._values_of(sums + self._lost.flatten()))

    def per_type(self) -> list[dict[str, Any]]:
        """Precision, recall and F1 of each type, the commonest first."""
        marked, found, right = self._columns()[:, :-1]
        return class_rows(self.types, right, marked, found)

    def _values_of(self, sums: Tensor) -> dict[str, Tensor]:
        """The metrics of `[…, S]` sums over rows; each `…` is a draw of a bootstrap."""
        blocks = sums.unflatten(-1, (3, -1))
        marked, found, right = blocks[..., :-1].unbind(-2)
        _, right_words, words = blocks[..., -1].unbind(-1)
        all_marked = marked.sum(-1)
        all_found = found.sum(-1)
        all_right = right.sum(-1)
        f1_by_type = 2 * right / (marked + found).clamp(min=1)
        return {
            "f1": 2 * all_right / (all_marked + all_found).clamp(min=1),
            "precision": all_right / all_found.clamp(min=1),
            "recall": all_right / all_marked.clamp(min=1),
            "macro_f1": mean_where(f1_by_type, marked + found > 0),
            "word_accuracy": right_words / words.clamp(min=1),
        }

    def _of_rows(self) -> Tensor:
        """`[B, S]` what each row adds; of this rank's rows until `values` has gathered all."""
        return self.sums.gathered() if self._whole is None else self._whole

    def _columns(self) -> Tensor:
        """`[3, types + 1]` the sums over all rows, with what was cut off."""
        return self._of_rows().sum(0).unflatten(0, (3, -1)) + self._lost
