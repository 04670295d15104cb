"""A trained masked language model: texts with mask tokens in, the likeliest words for each of them out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import pyarrow as pa
import torch

from flatout.data.batches.flat_batch import flat_batch
from flatout.data.tables.roles import Roles
from flatout.data.tables.table import Table
from flatout.data.tokens.subwords import Subwords
from flatout.engine.precision import Precision, answering
from flatout.errors import UserError
from flatout.inference.folder import ModelFolder
from flatout.inference.run_predictor import (
    Advance,
    Answered,
    FileOptions,
    RunPredictor,
    Scored,
    load_encoder,
    save_network,
)
from flatout.models.encoder.transformer import Outputs, Transformer
from flatout.tasks.masked_language import MaskedLanguageModel

_ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Filling:
    """A word that may stand at a mask token."""

    word: str
    probability: float


@dataclass(slots=True)
class MaskedWordPredictor(RunPredictor):
    """Fills in masked words; made by `MaskedWordPredictor.load(RUN)` or from a run's Result."""

    problems = ("none",)
    answers_to = "masked words"

    model: Transformer
    vocabulary: Subwords
    max_length: int
    roles: Roles
    """Columns of the texts it was trained on."""
    precision: Precision = Precision.auto

    @classmethod
    def of(cls, task: MaskedLanguageModel) -> MaskedWordPredictor:
        """The predictor of a trained task."""
        info = task.info
        return cls(cast(Transformer, task.model.eval()), info.vocabulary, info.max_length, info.roles)

    @classmethod
    def read_folder(cls, folder: ModelFolder, settings: dict[str, Any]) -> MaskedWordPredictor:
        data = settings["data"]
        columns = data["columns"]
        roles = Roles(tuple(columns["texts"]), "", columns["join"])
        model, vocabulary = load_encoder(folder, Outputs([], "words"), roles)
        return cls(model, vocabulary, data["max_length"], roles)

    def save(self, folder: Path, model_config: Any) -> None:
        data = {"max_length": self.max_length, "columns": asdict(self.roles)}
        settings = {"problem": self.problems[0], "data": data}
        save_network(folder, self.model, model_config, [], settings, self.vocabulary)

    @torch.inference_mode()
    def predict(self, texts: Sequence[str] | str, most: int = 5) -> list[list[list[Filling]]]:
        """For each text and each of its mask tokens the likeliest words, the likeliest first."""
        given = [texts] if isinstance(texts, str) else list(texts)
        found: list[list[list[Filling]]] = []
        self.model.eval()
        with answering(self.precision, self.device):
            for start in range(0, len(given), _ROWS_AT_ONCE):
                found += self._fill(given[start : start + _ROWS_AT_ONCE], most)
        return found

    def _fill(self, texts: list[str], most: int) -> list[list[list[Filling]]]:
        encoded = self.vocabulary.encode(pa.array(texts, pa.string()), max_length=self.max_length)
        rows = [row.tolist() for row in np.split(encoded.tokens, np.cumsum(encoded.lengths)[:-1])]
        batch = flat_batch(rows).to(self.device)
        is_mask_T = batch.tokens == self.vocabulary.require_mask("the tokenizer")
        batch.places = is_mask_T.nonzero().flatten()
        found: list[list[list[Filling]]] = [[] for _ in texts]
        if not len(batch.places):
            return found
        shares, ids = self.model(batch).float().softmax(-1).topk(min(most, self.vocabulary.size))
        in_order = torch.repeat_interleave(batch.rows, batch.lengths)[is_mask_T.cpu()].tolist()
        for row, words, probabilities in zip(in_order, ids.tolist(), shares.tolist(), strict=True):
            named = (self.vocabulary.tokenizer.decode([word]) for word in words)
            found[row].append([Filling(*each) for each in zip(named, probabilities, strict=True)])
        return found

    def open(self, file: str, verb: str) -> NoReturn:
        hint = "Fine-tune it: python -m train model=transformer model.pretrained=RUN, or export it."
        raise UserError(verb, "a run of task=mlm answers masked words, not rows", hint=hint)

    def answer_table(self, table: Table, options: FileOptions, others: Sequence[Any]) -> Iterator[Answered]:
        self.open(table.name, "predict")

    def score_table(self, table: Table, options: FileOptions, others: Sequence[Any], advance: Advance) -> Scored:
        self.open(table.name, "evaluate")
