"""Runs on texts: a vocabulary, classes or numbers as labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn

from flatout.data.store import Store
from flatout.data.subwords import Subwords
from flatout.data.text import PreparedText, TextDataConfig
from flatout.errors import UserError, require
from flatout.inference import Predictor
from flatout.inference.text import pair_separator
from flatout.kinds.kind import Feeds, Kind
from flatout.models.transformer import Outputs, Transformer, TransformerConfig
from flatout.optim import OptimConfig
from flatout.run_folder import RunFolder
from flatout.tasks.classification import ClassificationTask, Labels
from flatout.tasks.step import StepTask

SPLIT_ROWS = "splits.parquet"


class TextKind(Kind):
    """Texts to classes or numbers."""

    data: PreparedText

    def __init__(self, config: TextDataConfig, data: PreparedText) -> None:
        self.config, self.data = config, data
        facts = data.facts
        self.labels = Labels(
            problem=data.problem,
            classes=data.classes,
            counts=facts["class_counts"],
            num_rows=facts["splits"]["train"]["rows"],
            mean=facts["target_mean"],
            spread=facts["target_spread"],
        )

    def before_training(self, task: StepTask, feeds: Feeds, place: RunFolder) -> None:
        save_split_rows(self.data.store, place.path / SPLIT_ROWS)
        if ceilings := self.data.known_ceilings():
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
        encoder = self.data.vocabulary
        assert isinstance(encoder, Subwords), "RunConfig gives every encoder a tokenizer with a frame"
        separator = pair_separator(encoder, self.data.roles)
        outputs = Outputs(self.labels.classes, self.labels.problem.value)
        model = config.build(
            outputs, vocabulary_size=encoder.size, padding_id=encoder.frame.padding, separator_id=separator
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

    def build_task(
        self, model: nn.Module, task: Any, optim: OptimConfig, *, total_steps: int, clip: float, seed: int
    ) -> StepTask:
        return ClassificationTask(model, self.labels, task, optim, total_steps=total_steps, clip=clip)

    def predictor(self, task: StepTask) -> Predictor:
        return Predictor(
            model=task.model.eval(),
            vocabulary=self.data.vocabulary,
            labels=self.labels,
            max_length=self.config.max_length,
            roles=self.data.roles,
            escapes=self.config.clean.escapes,
            label_delimiter=self.config.label_delimiter,
        )


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
