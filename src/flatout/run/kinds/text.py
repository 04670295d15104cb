"""Runs on texts: a vocabulary, classes or numbers as labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor, nn

from flatout.data.info import TextInfo
from flatout.data.problem import Problem
from flatout.data.store.store import Store
from flatout.data.text import TextDataConfig
from flatout.data.tokens.subwords import Subwords, pair_separator
from flatout.engine.optimizer import OptimConfig
from flatout.errors import UserError, require
from flatout.inference.text import Predictor
from flatout.models.encoder.transformer import Outputs, Transformer, TransformerConfig
from flatout.run.kinds.kind import Answers, Feeds, Kind
from flatout.run.run_folder import RunFolder
from flatout.tasks.calibration import as_two_classes, best_thresholds, calibrated
from flatout.tasks.classification import Classifier, Labels
from flatout.tasks.task import Task

SPLIT_ROWS = "splits.parquet"


class TextKind(Kind):
    """Texts to classes or numbers."""

    data: TextInfo

    def __init__(self, config: TextDataConfig, data: TextInfo) -> None:
        self.config, self.data = config, data
        self.temperature = 1.0
        self.thresholds: list[float] = []
        facts = data.facts
        self.labels = Labels(
            problem=data.problem,
            classes=data.classes,
            counts=facts["class_counts"],
            num_rows=facts["splits"]["train"]["rows"],
            mean=facts["target_mean"],
            spread=facts["target_spread"],
        )

    @property
    def encoder(self) -> Subwords:
        """The tokenizer of an encoder."""
        assert isinstance(self.data.vocabulary, Subwords), "RunConfig gives every encoder a tokenizer with a frame"
        return self.data.vocabulary

    @property
    def outputs(self) -> Outputs:
        """What the outputs of a model mean."""
        return Outputs(self.labels.classes, self.labels.problem.value)

    def before_training(self, task: Task, feeds: Feeds, place: RunFolder) -> None:
        if place.is_first:
            save_split_rows(self.data.store, place.path / SPLIT_ROWS)
        tell_of_attention(task.model, feeds, place)
        if ceilings := self.data.ceilings:
            metrics = {
                f"{'val' if split == 'validation' else split}/accuracy": value for split, value in ceilings.items()
            }
            place.summary.set("baseline", {"name": "known ceiling", "metrics": metrics})

    def build_model(self, model: Any, place: RunFolder) -> nn.Module:
        if isinstance(model, TransformerConfig):
            return self._build_encoder(model, place)
        words = self.data.vocabulary.words() if getattr(model, "vectors", None) else None
        size = self.data.vocabulary.size
        built = model.build(num_outputs=self.labels.num_outputs, vocabulary_size=size, vocabulary=words)
        if words is not None:
            place.log.say(f"word vectors: {built.vectors_found:.1%} of {size:,} words found in {model.vectors}")
        return built

    def _build_encoder(self, config: TransformerConfig, place: RunFolder) -> Transformer:
        encoder = self.encoder
        separator = pair_separator(encoder, self.data.roles)
        model = config.build(
            self.outputs, vocabulary_size=encoder.size, padding_id=encoder.frame.padding, separator_id=separator
        )
        longest = model.longest_row()
        require(
            self.config.max_length <= longest,
            "data.max_length",
            f"{self.config.max_length}",
            allowed=f"at most {longest} for {model.family}",
        )
        table = model.net.get_input_embeddings().weight
        if encoder.size > len(table):
            what = f"{encoder.size:,} entries, but the encoder knows {len(table):,}"
            raise UserError("data.tokenizer", what, mend="Leave it out: the model's own tokenizer is used.")
        if model.is_flat:
            place.choose("batches", "flat", f"{model.family} runs without padding", "equal to padded rows, by test")
        else:
            place.choose("batches", "padded", model.why_padded, "rows of like length go together")
        return model

    def build_task(self, model: nn.Module, task: Any, optim: OptimConfig, *, total_steps: int, seed: int) -> Task:
        return Classifier(model, task, optim, labels=self.labels, total_steps=total_steps)

    def after_best(self, task: Task, feeds: Feeds, place: RunFolder) -> None:
        """Temperature and thresholds, found on the validation rows and told."""
        assert isinstance(task, Classifier)
        if self.labels.problem is Problem.single:
            self._calibrate(task.answers(feeds.validation), place)
        elif self.labels.problem is Problem.multi:
            outputs, targets, rows = task.answers(feeds.validation)
            self._calibrate(as_two_classes(outputs, targets, rows), place)
            self.thresholds = best_thresholds((outputs / self.temperature).sigmoid(), targets)
            task.set_thresholds(self.thresholds, self.temperature)
            span = f"{min(self.thresholds):.2f} to {max(self.thresholds):.2f}"
            place.choose("thresholds", span, "best F1 of each label", "on the validation rows")

    def _calibrate(self, answers: Sequence[Tensor], place: RunFolder) -> None:
        found = calibrated(*answers)
        self.temperature = found.temperature
        place.choose("temperature", f"{found.temperature:.2f}", found.why, found.evidence)
        place.summary.set("calibration", asdict(found))

    def predictor(self, task: Task) -> Answers:
        return Predictor(
            model=task.model.eval(),
            vocabulary=self.data.vocabulary,
            labels=self.labels,
            max_length=self.config.max_length,
            roles=self.data.roles,
            escapes=self.config.clean.escapes,
            label_delimiter=self.config.label_delimiter,
            temperature=self.temperature,
            thresholds=self.thresholds,
        )


def tell_of_attention(model: nn.Module, feeds: Feeds, place: RunFolder) -> None:
    """Say so where a device cannot do what an encoder's settings ask for."""
    is_flat = isinstance(model, Transformer) and model.is_flat
    if is_flat and model.attention_dropout and feeds.train.device.type == "cuda":
        why = "the fused kernel for rows of unequal length drops no scores, where it is used"
        place.choose("attention dropout", 0.0, why, f"the encoder asks for {model.attention_dropout:g}")


def save_split_rows(store: Store, path: Path) -> None:
    """Write which row of its table, counted from 1, each row of each split is."""
    schema = pa.schema([("split", pa.dictionary(pa.int8(), pa.string())), ("row", pa.int64())])
    with pq.ParquetWriter(
        path, schema, column_encoding={"row": "DELTA_BINARY_PACKED"}, use_dictionary=["split"]
    ) as file:
        for name, split in store.splits.items():
            rows = pa.array(split.fixed("rows") + 1)
            words = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(rows), np.int8)), pa.array([name]))
            file.write_table(pa.Table.from_arrays([words, rows], schema=schema))
