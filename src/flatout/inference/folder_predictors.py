"""Predictors that answer from an exported folder: by transformers, or by an ONNX file in it.

A folder is asked as its users would ask it: its tokenizer pads and cuts, and its configuration
names the outputs. What the run knows besides, such as columns and thresholds, comes from the run's
own predictor. Open this file to serve another kind of folder, or to refuse one. `open_folder.py`
opens the files, and `forms.py` lists the forms that are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from flatout.data.batches.flat_batch import flat_batch
from flatout.data.info import Labels
from flatout.data.problem import Problem
from flatout.data.ragged import row_bounds
from flatout.data.tables.roles import Roles
from flatout.data.tokens.long_texts import Long
from flatout.data.tokens.subwords import PAIR
from flatout.errors import UserError, require
from flatout.files import load_json, require_ordinary
from flatout.inference.linear_part import LinearPart
from flatout.inference.masked_words import MaskedWordPredictor
from flatout.inference.onnx_file import SIGNATURE, open_onnx, read_by
from flatout.inference.open_folder import (
    LogitsOf,
    logits_of_folder,
    logits_of_onnx,
    names_of,
    onnx_files,
    open_folder,
    require_names,
)
from flatout.inference.run_predictor import RunPredictor
from flatout.inference.tags import TaggedRows, TagPredictor
from flatout.inference.text import Predictor
from flatout.inference.words_onnx import encode_padded, open_tokenizer
from flatout.models.encoder.families import FLAT_FAMILIES, read_setting
from flatout.models.encoder.transformer import Compute, Outputs, Transformer
from flatout.tasks.abstention import WordAnswers

_ROWS_AT_ONCE = 32  # rows of a batch
_NO_LIMIT = 1 << 20  # a tokenizer that says more has no limit: transformers writes 1e30
# how users of a folder call its tokenizer
_AS_USUAL = {"padding": True, "truncation": True, "return_tensors": "pt"}
_PROBLEMS = {"multi_label_classification": Problem.multi, "regression": Problem.regression}


@dataclass(slots=True, kw_only=True)
class FolderPredictor(Predictor):
    """A folder of transformers, or an ONNX file in it, for texts."""

    tokenizer: Any
    logits_of: LogitsOf
    where: str = ""
    linear_part: LinearPart | None = None  # what is added to the logits of an ONNX file

    @classmethod
    def of_folder(cls, folder: Path, text: str = "text") -> FolderPredictor:
        """Anybody's folder, for texts in the column `text`."""
        net, tokenizer = open_folder(folder, Outputs([], "single"))
        with read_by("flatout", folder):
            names = names_of(net)
            problem = _PROBLEMS.get(
                net.config.problem_type, Problem.regression if len(names) == 1 else Problem.single
            )
            # The folder does not say how long a row may be. Some families number places from 2 on,
            # so two of the places are none that a row can have.
            if tokenizer.model_max_length > _NO_LIMIT:
                tokenizer.model_max_length = (
                    read_setting(net.config, "max_position_embeddings", 514) - 2
                )
        labels = Labels(problem, names, [], 0)
        roles = Roles((text,), "label")
        return cls(
            model=net,
            vocabulary=tokenizer,  # only `tokenizer` makes ids here
            labels=labels,
            max_length=tokenizer.model_max_length,
            roles=roles,
            tokenizer=tokenizer,
            logits_of=lambda given: net(**given).logits,
            where=str(folder),
        )

    def predictors_of(self, folder: Path) -> dict[str, RunPredictor]:
        """A predictor for the folder's weights, and one for each ONNX file, by name."""
        return {
            name: replace(self, logits_of=logits_of, where=name)
            for name, logits_of in logits_of_folder(folder, self.model).items()
        }

    def run_flat(self) -> FolderPredictor | None:
        """A predictor with these weights in our flat layers; None for other families."""
        net: Any = deepcopy(self.model)
        if net.config.model_type not in FLAT_FAMILIES:
            return None
        model = Outputs([], "single").wrap(net, Compute.flat, None).eval()

        def logits_of(tensors: Mapping[str, Tensor]) -> Tensor:
            ids = tensors["input_ids"]
            masks = tensors.get("attention_mask", torch.ones_like(ids)).bool()
            batch = flat_batch([row[mask] for row, mask in zip(ids, masks, strict=True)])
            return model(batch)[batch.rows.argsort()]

        return replace(self, logits_of=logits_of)

    @torch.inference_mode()
    def outputs(self, texts: pa.Array) -> Tensor:
        """`[N, C]` logits, in batches in the order of the texts."""
        rows = [text.split(PAIR) for text in texts.to_pylist()]
        num_outputs = self.labels.num_outputs
        blocks = [torch.empty(0, num_outputs)]
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            columns = list(map(list, zip(*rows[start : start + _ROWS_AT_ONCE], strict=True)))
            with read_by("flatout", Path(self.where)):
                answers = self.logits_of(self.tokenizer(*columns, **_AS_USUAL)).float()
                if self.linear_part is not None:
                    answers = answers + torch.from_numpy(self.linear_part.read(columns[0]))
            require(
                answers.ndim == 2,
                self.where,
                "answers each token, not each row",
                hint="Take it out of the folder to judge the rest.",
            )
            num_rows, answered = answers.shape
            require(
                answered == num_outputs,
                self.where,
                f"answers {answered} numbers a row, {num_outputs} are named in config.json",
            )
            require(
                num_rows == len(columns[0]),
                self.where,
                f"answers {num_rows} rows of {len(columns[0])}",
            )
            blocks.append(answers)
        return torch.cat(blocks)


@dataclass(slots=True, kw_only=True)
class FolderTagger(TagPredictor):
    """A folder of transformers, or an ONNX file in it, for lists of words."""

    tokenizer: Any
    logits_of: LogitsOf
    where: str

    @torch.inference_mode()
    def tags(self, words: pa.Array) -> TaggedRows:
        rows = words.to_pylist()
        offsets = row_bounds(pc.list_value_length(words))
        tagged = TaggedRows.untagged(offsets, self.names)
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            batch = rows[start : start + _ROWS_AT_ONCE]
            with read_by("flatout", Path(self.where)):
                tensors = self.tokenizer(batch, is_split_into_words=True, **_AS_USUAL)
                shares = self.logits_of(tensors).float().softmax(-1)
                shape = tuple(tensors["input_ids"].shape)
                require(
                    shares.shape[:-1] == shape,
                    self.where,
                    f"answers {_shown_shape(shares.shape[:-1])} for rows and tokens"
                    f" {_shown_shape(shape)}",
                    hint="Export the run again, or name the file of another one.",
                )
                require(
                    shares.shape[-1] == len(self.names),
                    self.where,
                    f"answers {shares.shape[-1]} numbers a word, {len(self.names)} are named",
                )
            for number in range(len(batch)):
                # The first token of each word: tokens of the words None 0 0 1 None → {0: 1, 1: 3}.
                firsts = dict[int, int]()
                for place, word in enumerate(tensors.word_ids(number)):
                    if word is not None:
                        firsts.setdefault(word, place)
                of_row = offsets[start + number] + np.array(list(firsts), np.int64)
                # The bounds of all rows serve for the words of one: only ids, probabilities and
                # types are read.
                answers = WordAnswers.of_tags(
                    shares[number, list(firsts.values())], offsets, is_plain=tagged.is_plain
                )
                tagged.ids[of_row] = answers.ids
                tagged.probabilities[of_row] = answers.probabilities
                tagged.types[of_row] = answers.types
        return tagged


def _shown_shape(sizes: Sequence[int]) -> str:
    """`8 × 32`, or a word for no number at all."""
    return " × ".join(map(str, sizes)) or "one number"


def predictors_of_folder(predictor: RunPredictor, folder: Path) -> dict[str, RunPredictor]:
    """Predictors for the exported folder of a run, by name."""
    if folder.is_dir():
        require_ordinary(*folder.iterdir())
    kind = predictor.long_texts.kind
    require(
        kind is Long.cut,
        str(folder),
        f"its tokenizer cuts the texts that the run reads with data.long={kind}",
        hint="Leave it out.",
    )
    if type(predictor) is Predictor:
        is_encoder = isinstance(predictor.model, Transformer)
        predictors_of = encoder_predictors if is_encoder else word_network_predictors
        return predictors_of(predictor, folder)
    if type(predictor) is TagPredictor:
        net, tokenizer = open_folder(folder, Outputs([], "tags"))
        predictors: dict[str, RunPredictor] = {}
        for name, logits_of in logits_of_folder(folder, net).items():
            predictors[name] = FolderTagger(
                model=predictor.model,
                vocabulary=predictor.vocabulary,
                names=names_of(net),
                max_length=predictor.max_length,
                roles=predictor.roles,
                tokenizer=tokenizer,
                logits_of=logits_of,
                where=name,
            )
        return predictors
    if type(predictor) is MaskedWordPredictor:
        raise UserError(
            str(folder), f"no exported form of a run on {predictor.answers_to} answers rows"
        )
    files = onnx_files(folder)
    require(bool(files), str(folder), "no ONNX file in it", hint="Name an exported folder.")
    for file in files:
        with read_by("onnxruntime", file):
            open_onnx(file)
    return {str(file): predictor.through_onnx(file) for file in files}


def encoder_predictors(predictor: Predictor, folder: Path) -> dict[str, RunPredictor]:
    """Predictors of texts from an exported folder of an encoder, by name."""
    opened = FolderPredictor.of_folder(folder)
    of_run = predictor.labels.classes
    labels = opened.labels.classes
    _require_own_labels(predictor, folder, labels)
    opened.roles, opened.label_delimiter = predictor.roles, predictor.label_delimiter
    if predictor.thresholds:
        opened.thresholds = [predictor.thresholds[of_run.index(name)] for name in labels]
    opened.labels = replace(opened.labels, problem=predictor.labels.problem)
    return opened.predictors_of(folder)


def word_network_predictors(predictor: Predictor, folder: Path) -> dict[str, RunPredictor]:
    """Predictors of texts from the exported folder of a network on words, by name."""
    files = onnx_files(folder)
    require(bool(files), str(folder), "no ONNX file in it", hint="Name an exported folder.")
    with read_by("tokenizers", folder):
        tokenizer = open_tokenizer(folder)
        labels = load_json(folder / SIGNATURE)["labels"]
    require_names(labels, folder)
    with read_by("flatout", folder):
        linear_part = LinearPart.of(folder)
    _require_own_labels(predictor, folder, labels)
    predictors: dict[str, RunPredictor] = {}
    for file in files:
        predictors[str(file)] = FolderPredictor(
            model=predictor.model,
            vocabulary=predictor.vocabulary,
            labels=replace(predictor.labels, classes=labels),
            max_length=predictor.max_length,
            roles=predictor.roles,
            label_delimiter=predictor.label_delimiter,
            thresholds=predictor.thresholds,
            tokenizer=lambda texts, **_: encode_padded(tokenizer, texts),
            logits_of=logits_of_onnx(file),
            where=str(file),
            linear_part=linear_part,
        )
    return predictors


def _require_own_labels(predictor: Predictor, folder: Path, labels: list[str]) -> None:
    """Refuse the folder of another run."""
    of_run = predictor.labels.classes
    has_names = predictor.labels.problem is not Problem.regression
    require(
        not has_names or set(labels) == set(of_run),
        str(folder),
        f"its labels are {', '.join(labels[:8])}, those of the run {', '.join(of_run[:8])}",
        hint="Name a folder of this run.",
    )
