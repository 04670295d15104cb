"""The predictor of a run that learned masked words: it fills them in.

    Paris is the [MASK] of France.    capital 0.82, city 0.06, …

It answers texts in memory alone: files have no answers of this kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import pyarrow as pa
import torch

from flatout.data.batches.flat_batch import flat_batch
from flatout.data.tables.reading import ReadingConfig
from flatout.data.tables.roles import Roles
from flatout.data.tokens.subwords import Subwords
from flatout.engine.precision import answering
from flatout.errors import UserError
from flatout.inference.model_folder import ModelFolder, RowSettings
from flatout.inference.run_predictor import RunPredictor, texts_in_memory
from flatout.models.contract import ModelConfig
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

    @classmethod
    def of(cls, task: MaskedLanguageModel) -> MaskedWordPredictor:
        info = task.info
        return cls(
            cast(Transformer, task.model.eval()), info.vocabulary, info.max_length, info.roles
        )

    @classmethod
    def read_folder(cls, folder: ModelFolder, settings: dict[str, Any]) -> MaskedWordPredictor:
        roles = folder.roles()
        data = folder.record(RowSettings, settings["data"], "data")
        folder.require_rows(data)
        model, vocabulary = folder.encoder(Outputs([], "words"), roles)
        folder.require_short(data, model)
        return cls(model, vocabulary, data.max_length, roles)

    def save(self, folder: Path, model_config: ModelConfig) -> None:
        settings = {
            "problem": self.problems[0],
            "data": {"max_length": self.max_length, "columns": asdict(self.roles)},
        }
        ModelFolder(folder).write(self.model, model_config, [], settings, self.vocabulary)

    @torch.inference_mode()
    def predict(self, texts: Sequence[str] | str, most: int = 5) -> list[list[list[Filling]]]:
        """For each text and each of its mask tokens the likeliest words, the likeliest first."""
        rows = texts_in_memory(texts, self.roles)
        fillings: list[list[list[Filling]]] = []
        self.model.eval()
        with answering(self.precision, self.device):
            for start in range(0, len(rows), _ROWS_AT_ONCE):
                fillings += self._fill(rows[start : start + _ROWS_AT_ONCE], most)
        return fillings

    def _fill(self, texts: list[str], most: int) -> list[list[list[Filling]]]:
        encoded = self.vocabulary.encode(pa.array(texts, pa.string()), max_length=self.max_length)
        ends = np.cumsum(encoded.lengths)
        rows = [row.tolist() for row in np.split(encoded.tokens, ends[:-1])]
        batch = flat_batch(rows).to(self.device)
        is_mask_T = batch.tokens == self.vocabulary.require_mask("the tokenizer")
        batch.places = is_mask_T.nonzero().flatten()
        of_texts: list[list[list[Filling]]] = [[] for _ in texts]
        if not len(batch.places):
            return of_texts
        logits = self.model(batch).float()
        shares, ids = logits.softmax(-1).topk(min(most, self.vocabulary.size))
        row_of_token = torch.repeat_interleave(batch.rows, batch.lengths)
        row_of_mask = row_of_token[is_mask_T.cpu()].tolist()
        masks = zip(row_of_mask, ids.tolist(), shares.tolist(), strict=True)
        for row, words, probabilities in masks:
            fillings = []
            for word, probability in zip(words, probabilities, strict=True):
                text = self.vocabulary.tokenizer.decode([word])
                fillings.append(Filling(text, probability))
            of_texts[row].append(fillings)
        return of_texts

    def open(self, file: str, verb: str, reading: ReadingConfig | None = None) -> NoReturn:
        raise UserError(
            verb,
            "a run of task=mlm answers masked words, not rows",
            hint=(
                "Fine-tune it: python -m train model=transformer model.pretrained=RUN, or"
                " export it."
            ),
        )

    def rows(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("every verb opens its file first, which is refused")

    score_table = rows
    answer_table = score_table
