"""A trained model and its vocabulary, as one thing that answers: texts in, classes with probabilities out.

A run leaves a `model/` folder: the tokenizer, the weights, the class names and the settings that rebuild the model.
Rows are sorted by length inside a block, so prediction pads as little as training does, and given back in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.plan import Layout, PlanSettings
from flatout.data.checks.characters import decode_escapes
from flatout.data.checks.cleaning_settings import Escapes
from flatout.data.info import Labels
from flatout.data.problem import Problem
from flatout.data.store.store import Ragged, StoreSplit
from flatout.data.tables.roles import Roles
from flatout.data.tokens.subwords import PAIR, Encoder, read_encoder
from flatout.engine.precision import Precision, answering
from flatout.errors import UserError
from flatout.inference.dotted_settings import built
from flatout.inference.encoder_folder import TOKENIZER, load_encoder, save_encoder, without_files
from flatout.inference.folder import ModelFolder
from flatout.models import kind_of, model_class
from flatout.models.encoder.transformer import Outputs, Transformer, TransformerConfig
from flatout.tasks.classification import Classifier


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a model says of one text."""

    label: str | list[str] | float
    """The class, the classes, or the number."""
    probability: float | list[float] | None
    """Its probability, or theirs; None for a number."""


@dataclass(slots=True)
class Predictor:
    """Answers for texts; made by `Predictor.load(RUN)` or from a run's Result."""

    problems: ClassVar = ("single", "multi", "regression")
    """What `config.json` of its runs names."""

    model: nn.Module
    vocabulary: Encoder
    labels: Labels
    max_length: int
    roles: Roles
    """Columns of the texts and the labels in the tables it was trained on."""
    escapes: Escapes = Escapes.keep
    label_delimiter: str | None = None
    temperature: float = 1.0
    """What logits are divided by, so that probabilities are as often right as they say."""
    thresholds: list[float] = field(default_factory=list)
    """Least probability of each label where there are several a row; empty: one half."""
    precision: Precision = Precision.auto
    """Arithmetic of answers; auto: fp32 on a CPU, sixteen bits on a GPU."""

    @classmethod
    def of(cls, task: Classifier) -> Predictor:
        """The predictor of a trained task."""
        info = task.info
        return cls(
            model=task.model.eval(),
            vocabulary=info.vocabulary,
            labels=task.labels,
            max_length=info.max_length,
            roles=info.roles,
            escapes=info.escapes,
            label_delimiter=info.label_delimiter,
            temperature=task.temperature,
            thresholds=task.thresholds,
        )

    @classmethod
    def load(cls, run: str | Path, device: str | torch.device = "cpu") -> Predictor:
        """The best model of a run, from the run's folder or its `model` folder."""
        folder = ModelFolder.find(run)
        with folder.read():
            return cls._read(folder, torch.device(device))

    @classmethod
    def _read(cls, folder: ModelFolder, device: torch.device) -> Predictor:
        settings = folder.settings()
        if "scale" not in settings:
            raise UserError(str(folder.path), "a run on bit strings", hint="It answers bit strings, not texts.")
        vocabulary = read_encoder((folder.path / TOKENIZER).read_text(encoding="utf-8"))
        classes = folder.labels()
        labels = Labels(Problem(settings["problem"]), classes, [], 0, **settings["scale"])
        described, data = settings["model"], settings["data"]
        columns = data["columns"]
        roles = Roles(tuple(columns["texts"]), columns["label"], columns["join"])
        config: Any = built(
            model_class(described["kind"], folder.settings_file),
            {**described["config"], **without_files(described["config"])},
        )
        if isinstance(config, TransformerConfig):
            outputs = Outputs(classes, settings["problem"])
            model: nn.Module = load_encoder(folder, outputs, separator=roles.join == PAIR)[0]
        else:
            model = config.build(num_outputs=len(classes), vocabulary_size=vocabulary.size)
            model.load_state_dict(folder.weights())
        return cls(
            model=model.to(device).eval(),
            vocabulary=vocabulary,
            labels=labels,
            max_length=data["max_length"],
            roles=roles,
            escapes=Escapes(data["escapes"]),
            label_delimiter=data["label_delimiter"],
            temperature=settings.get("temperature", 1.0),
            thresholds=settings.get("thresholds", []),
        )

    def save(self, folder: Path, model_config: Any) -> None:
        """Write the `model` folder; `model_config` must be of a class in MODELS."""
        settings = {
            "problem": self.labels.problem.value,
            "scale": {"mean": self.labels.mean, "spread": self.labels.spread},
            "temperature": self.temperature,
            "thresholds": self.thresholds,
            "data": {
                "max_length": self.max_length,
                "columns": asdict(self.roles),
                "escapes": self.escapes.value,
                "label_delimiter": self.label_delimiter,
            },
        }
        ModelFolder(folder).write(self.model, kind_of(model_config), model_config, self.labels.classes, settings)
        if isinstance(self.model, Transformer):
            save_encoder(folder, self.model)
        (folder / TOKENIZER).write_text(self.vocabulary.to_json(), encoding="utf-8")

    def predict(self, texts: Sequence[str | tuple[str, str]] | str) -> list[Prediction]:
        """What the model says of each text, or of each pair of texts, in their order."""
        given = [texts] if isinstance(texts, str) else list(texts)
        rows = [text if isinstance(text, str) else PAIR.join(text) for text in given]
        if not rows:
            return []
        return self.read(self.outputs(pa.array(rows, pa.string())))

    @torch.inference_mode()
    def outputs(self, texts: pa.Array, rows_per_batch: int = 512) -> Tensor:
        """`[N, C]` logits, or values of a regression, on the host and in the order of the texts."""
        self.model.eval()
        if self.escapes is Escapes.decode:
            texts = decode_escapes(texts)[0]
        found = torch.empty(len(texts), self.labels.num_outputs)
        with answering(self.precision, next(self.model.parameters()).device):
            for batch in self._batches(texts, rows_per_batch):
                found[batch.rows] = self.model(batch).float().cpu()
        if self.labels.problem is Problem.regression:
            found = found * self.labels.spread + self.labels.mean
        return found

    def read(self, outputs: Tensor) -> list[Prediction]:
        """Logits as classes with probabilities."""
        classes = self.labels.classes
        if self.labels.problem is Problem.regression:
            return [Prediction(value, None) for value in outputs.squeeze(-1).tolist()]
        if self.labels.problem is Problem.single:
            probabilities, ids = self.shares(outputs).max(-1)
            found = zip(ids.tolist(), probabilities.tolist(), strict=True)
            return [Prediction(classes[i], probability) for i, probability in found]
        least, rows = self.least_shares().tolist(), self.shares(outputs).tolist()
        chosen = [[(c, p) for c, p, t in zip(classes, row, least, strict=True) if p >= t] for row in rows]
        return [Prediction([c for c, _ in row], [p for _, p in row]) for row in chosen]

    def shares(self, outputs: Tensor) -> Tensor:
        """Logits as probabilities."""
        outputs = outputs / self.temperature
        return outputs.softmax(-1) if self.labels.problem is Problem.single else outputs.sigmoid()

    def least_shares(self) -> Tensor:
        """`[C]` from which probability on a label is answered, where there are several a row."""
        return torch.tensor(self.thresholds) if self.thresholds else torch.full((self.labels.num_outputs,), 0.5)

    def _batches(self, texts: pa.Array, rows_per_batch: int) -> Iterator[FlatBatch]:
        encoded = self.vocabulary.encode(texts, max_length=self.max_length)
        offsets = np.append(0, np.cumsum(encoded.lengths, dtype=np.int64))
        split = StoreSplit("texts", len(texts), {"tokens": Ragged(encoded.tokens, offsets, encoded.lengths)})
        layout = Layout(getattr(self.model, "layout", Layout.flat))
        plan = PlanSettings(rows_per_batch=rows_per_batch, layout=layout, shuffle=False)
        return iter(Feed(split, plan, device=next(self.model.parameters()).device))
