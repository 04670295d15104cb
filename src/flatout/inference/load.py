"""What a finished run answers with, loaded from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pyarrow.compute as pc
import torch

from flatout.bits.grams import FIELD_END
from flatout.bits.info import BitInfo
from flatout.bits.predictor import GramPredictor
from flatout.bits.reconstruct import LetterOrder
from flatout.bits.task import GramDecoder
from flatout.engine.precision import Precision
from flatout.errors import UserError
from flatout.inference.folder import ModelFolder
from flatout.inference.masked_words import MaskedWordPredictor
from flatout.inference.sequences import SequencePredictor
from flatout.inference.tags import TagPredictor
from flatout.inference.text import Predictor
from flatout.models.encoder.transformer import Transformer
from flatout.tasks.classification import Classifier
from flatout.tasks.masked_language import MaskedLanguageModel
from flatout.tasks.sequences import SequenceLabeller, SequenceRegressor
from flatout.tasks.tagging import Tagger
from flatout.tasks.task import Task

AnyPredictor = Predictor | GramPredictor | TagPredictor | SequencePredictor | MaskedWordPredictor
_TEXTS_READ = 131_072


def answering_devices(names: str = "auto") -> list[torch.device]:
    """Devices by their names, with commas between them; auto: all GPUs, where there are any."""
    count = torch.cuda.device_count()
    numbered = [f"cuda:{number}" for number in range(count)]
    if names == "auto":
        return [torch.device(name) for name in numbered or ["cpu"]]
    known = ["cpu", *(["cuda"] if count else []), *numbered]
    for name in names.split(","):
        if name not in known:
            raise UserError("--device", f"no device {name!r} here", allowed=", ".join(["auto", *known]))
    return [torch.device(name) for name in names.split(",")]


def load_predictor(
    run: str | Path, device: str | torch.device = "cpu", precision: Precision = Precision.auto
) -> AnyPredictor:
    """The best model of a run, of whichever kind the run was."""
    problem = ModelFolder.find(run).settings().get("problem")
    predictor: AnyPredictor
    if problem == GramPredictor.problem:
        predictor = GramPredictor.load(run, device)
    elif problem == TagPredictor.problem:
        predictor = TagPredictor.load(run, device)
    elif problem == SequencePredictor.problem:
        predictor = SequencePredictor.load(run, device)
    elif problem == MaskedWordPredictor.problem:
        predictor = MaskedWordPredictor.load(run, device)
    else:
        predictor = Predictor.load(run, device)
    predictor.precision = precision
    return predictor


def build_predictor(task: Task) -> AnyPredictor:
    """What answers for new rows with a trained task."""
    network, info = task.model.eval(), task.info
    if isinstance(task, SequenceRegressor | SequenceLabeller):
        return SequencePredictor.of(task, info)
    if isinstance(task, GramDecoder):
        return _gram_predictor(task, info)
    if isinstance(task, MaskedLanguageModel):
        return MaskedWordPredictor(cast(Transformer, network), info.vocabulary, info.max_length, info.roles)
    if isinstance(task, Tagger):
        return TagPredictor(
            model=cast(Transformer, network),
            vocabulary=info.vocabulary,
            names=task.labels.names,
            max_length=info.max_length,
            roles=info.roles,
            temperature=task.temperature,
        )
    assert isinstance(task, Classifier)
    return Predictor(
        model=network,
        vocabulary=info.vocabulary,
        labels=task.labels,
        max_length=info.max_length,
        roles=info.roles,
        escapes=info.escapes,
        label_delimiter=info.label_delimiter,
        temperature=task.temperature,
        thresholds=task.thresholds,
    )


def _gram_predictor(task: GramDecoder, info: BitInfo) -> GramPredictor:
    texts = pc.replace_substring(info.texts("train").slice(0, _TEXTS_READ), FIELD_END, "")
    return GramPredictor(
        model=task.model,
        labels=task.labels,
        num_inputs=info.num_inputs,
        threshold=task.threshold,
        numbers=info.numbers,
        bits_column=info.bits_column,
        text_columns=info.text_columns,
        form=info.form,
        order=LetterOrder.learn(texts, task.labels.hashed),
    )
