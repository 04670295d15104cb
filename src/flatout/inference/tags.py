"""A trained tagger: rows of words in, a tag for each word and the entities they mark out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.plan import Layout, PlanSettings
from flatout.data.store.store import Ragged, StoreSplit
from flatout.data.tables.entities import find_entities
from flatout.data.tables.roles import Roles
from flatout.data.tokens.subwords import EncodedWords, Subwords
from flatout.engine.precision import Precision, answering
from flatout.errors import UserError
from flatout.inference.encoder_folder import TOKENIZER, load_encoder, save_encoder
from flatout.inference.folder import ModelFolder
from flatout.models import kind_of
from flatout.models.encoder.transformer import Outputs, Transformer
from flatout.tasks.tagging import Tagger


@dataclass(frozen=True, slots=True)
class Entity:
    """A run of words with a type."""

    type: str
    text: str
    """Its words, with blanks between."""
    start: int
    """Its first word, counted from 0."""
    stop: int
    """The word after its last."""
    probability: float
    """Of its least certain word."""


@dataclass(frozen=True, slots=True)
class TagPrediction:
    """What a model says of a row of words."""

    words: list[str]
    tags: list[str]
    """One for each word; `O` for words beyond the longest row that the model reads."""
    entities: list[Entity]


@dataclass(frozen=True, slots=True)
class TaggedRows:
    """Answers for rows of words: a tag's number and its probability for each word, row after row."""

    ids: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    offsets: NDArray[np.int64]
    lost: int
    """Words that the model did not see."""


@dataclass(slots=True)
class TagPredictor:
    """Tags for words; made by `TagPredictor.load(RUN)` or from a run's Result."""

    problems: ClassVar = ("tags",)

    model: Transformer
    vocabulary: Subwords
    names: list[str]
    """O, then B and I of each type."""
    max_length: int
    roles: Roles
    """Columns of the words and the tags in the tables it was trained on."""
    precision: Precision = Precision.auto
    """Arithmetic of answers; auto: fp32 on a CPU, sixteen bits on a GPU."""
    temperature: float = 1.0
    """What logits are divided by, so that probabilities are as often right as they say."""

    @classmethod
    def of(cls, task: Tagger) -> TagPredictor:
        """The predictor of a trained task."""
        return cls(
            model=cast(Transformer, task.model.eval()),
            vocabulary=task.info.vocabulary,
            names=task.labels.names,
            max_length=task.info.max_length,
            roles=task.info.roles,
            temperature=task.temperature,
        )

    @classmethod
    def load(cls, run: str | Path, device: str | torch.device = "cpu") -> TagPredictor:
        """The best model of a run, from the run's folder or its `model` folder."""
        folder = ModelFolder.find(run)
        with folder.read():
            return cls._read(folder, torch.device(device))

    @classmethod
    def _read(cls, folder: ModelFolder, device: torch.device) -> TagPredictor:
        settings = folder.settings()
        if settings.get("problem") not in cls.problems:
            raise UserError(str(folder.path), "no run on tags", hint="It answers whole texts.")
        names, data = folder.labels(), settings["data"]
        model, vocabulary = load_encoder(folder, Outputs(names, "tags"), separator=False)
        roles = Roles(tuple(data["columns"]["texts"]), data["columns"]["label"])
        temperature = settings.get("temperature", 1.0)
        return cls(model.to(device).eval(), vocabulary, names, data["max_length"], roles, temperature=temperature)

    def save(self, folder: Path, model_config: Any) -> None:
        """Write the `model` folder."""
        settings = {
            "problem": self.problems[0],
            "temperature": self.temperature,
            "data": {"max_length": self.max_length, "columns": asdict(self.roles)},
        }
        ModelFolder(folder).write(self.model, kind_of(model_config), model_config, self.names, settings)
        save_encoder(folder, self.model)
        (folder / TOKENIZER).write_text(self.vocabulary.to_json(), encoding="utf-8")

    def predict(self, rows: Sequence[str | Sequence[str]] | str) -> list[TagPrediction]:
        """Tags and entities of each row: a list of words, or a text that is parted at its blanks."""
        given = [rows] if isinstance(rows, str) else list(rows)
        words = [row.split() if isinstance(row, str) else list(row) for row in given]
        return self.read(words, self.tags(pa.array(words, pa.list_(pa.large_string())))) if words else []

    @torch.inference_mode()
    def tags(self, words: pa.Array, rows_per_batch: int = 256) -> TaggedRows:
        """A tag for each word of rows of words, in their order."""
        self.model.eval()
        encoded = self.vocabulary.encode_words(words, max_length=self.max_length)
        starts = np.cumsum(encoded.block.lengths, dtype=np.int64) - encoded.block.lengths
        ids = np.zeros(len(encoded.block.tokens), np.int64)
        shares = np.zeros(len(encoded.block.tokens), np.float32)
        with answering(self.precision, next(self.model.parameters()).device):
            for batch in self._batches(encoded, rows_per_batch):
                best = (self.model(batch).float() / self.temperature).softmax(-1).max(-1)
                rows, lengths = batch.rows.numpy(), batch.lengths.numpy()
                place = np.arange(batch.num_tokens) - np.repeat(np.cumsum(lengths) - lengths, lengths)
                there = np.repeat(starts[rows], lengths) + place
                ids[there], shares[there] = best.indices.cpu().numpy(), best.values.cpu().numpy()
        counts = pa.compute.list_value_length(words).to_numpy(zero_copy_only=False).astype(np.int64)
        offsets = np.append(0, np.cumsum(counts))
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        is_seen = place < np.repeat(encoded.words, counts)
        found = TaggedRows(np.zeros(offsets[-1], np.int64), np.ones(offsets[-1], np.float32), offsets, 0)
        found.ids[is_seen], found.probabilities[is_seen] = ids[encoded.firsts], shares[encoded.firsts]
        return TaggedRows(found.ids, found.probabilities, offsets, int((~is_seen).sum()))

    def read(self, words: Sequence[Sequence[str]], found: TaggedRows) -> list[TagPrediction]:
        """Numbers as tags by name, and their entities."""
        entities = find_entities(found.ids, found.offsets)
        by_row: list[list[Entity]] = [[] for _ in words]
        for row, start, stop, kind in zip(
            *(values.tolist() for values in (entities.row, entities.start, entities.stop, entities.kind)), strict=True
        ):
            first = int(found.offsets[row])
            surety = float(found.probabilities[first + start : first + stop].min())
            text = " ".join(words[row][start:stop])
            by_row[row].append(Entity(self.names[1 + 2 * kind][2:], text, start, stop, surety))
        return [
            TagPrediction(list(row), [self.names[number] for number in found.ids[first:last]], own)
            for row, own, first, last in zip(words, by_row, found.offsets, found.offsets[1:], strict=False)
        ]

    def _batches(self, encoded: EncodedWords, rows_per_batch: int) -> Iterator[FlatBatch]:
        block = encoded.block
        offsets = np.append(0, np.cumsum(block.lengths, dtype=np.int64))
        split = StoreSplit("rows", len(block.lengths), {"tokens": Ragged(block.tokens, offsets, block.lengths)})
        plan = PlanSettings(rows_per_batch=rows_per_batch, layout=Layout(self.model.layout), shuffle=False)
        return iter(Feed(split, plan, device=next(self.model.parameters()).device))
