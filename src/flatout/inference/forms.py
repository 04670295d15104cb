"""Forms of one model: its own layers, the library's layers, a folder of transformers, an ONNX file.

`verify` compares them. Each form is a predictor, so whatever asks a run can ask it too. The
reference is fp32 on the CPU, each row alone. For an encoder, the reference goes through the
library's own layers: it shares no attention, padding or batch with the forms that are judged. A
folder is asked as its users would ask it: its tokenizer pads and cuts, and its configuration names
the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from flatout.data.batches.flat_batch import flat_batch
from flatout.data.info import Labels
from flatout.data.problem import Problem
from flatout.data.ragged import row_bounds
from flatout.data.tables.hub import require_complete
from flatout.data.tables.roles import Roles
from flatout.data.tokens.long_texts import Long
from flatout.data.tokens.subwords import PAIR
from flatout.engine.precision import Precision
from flatout.errors import UserError, require
from flatout.files import load_json, require_ordinary
from flatout.inference.export import outputs_of, plain_model
from flatout.inference.linear_part import LinearPart
from flatout.inference.masked_words import MaskedWordPredictor
from flatout.inference.model_folder import SETTINGS
from flatout.inference.onnx_file import SIGNATURE, open_onnx, read_by
from flatout.inference.records import is_name
from flatout.inference.run_predictor import RunPredictor
from flatout.inference.tags import TaggedRows, TagPredictor
from flatout.inference.text import Predictor
from flatout.inference.words_onnx import encode_padded, open_tokenizer
from flatout.models.encoder.families import FLAT_FAMILIES, read_setting
from flatout.models.encoder.transformer import Compute, Outputs, Transformer, quiet_library
from flatout.tasks.abstention import WordAnswers

_ROWS_AT_ONCE = 32
_MOST_MIXED = 40
_NO_LIMIT = 1 << 20
_AS_USUAL = {"padding": True, "truncation": True, "return_tensors": "pt"}
Ask = Callable[[Mapping[str, Tensor]], Tensor]  # what a tokenizer gives, padded, as logits
_FEWER_BITS = ("int8", "quant", "16")  # what names of files say of their numbers
_PROBLEMS = {"multi_label_classification": Problem.multi, "regression": Problem.regression}


@dataclass(frozen=True, slots=True)
class Form:
    """A predictor, and the way in which it gets its rows: alone, in batches, in another order."""

    name: str
    predictor: RunPredictor
    ask: Callable[[RunPredictor, list[Any]], list[Any]]
    is_exact: bool = True  # whether numbers are to be those of fp32, too, and not answers alone

    def answers(self, rows: list[Any]) -> list[Any]:
        with quiet_library():
            return self.ask(self.predictor, rows)


def alone(predictor: RunPredictor, rows: list[Any]) -> list[Any]:
    return [predictor.predict([row])[0] for row in rows]


def together(predictor: RunPredictor, rows: list[Any]) -> list[Any]:
    return predictor.predict(rows)


def reverse_rows(predictor: RunPredictor, rows: list[Any]) -> list[Any]:
    return predictor.predict(rows[::-1])[::-1]


def answer_mixed_rows(predictor: RunPredictor, rows: list[Any], seed: int = 0) -> list[Any]:
    """In random order, in batches of one row to forty: the neighbours of a row must not matter."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(rows)).tolist()
    answers_of_rows = list[Any](rows)
    start = 0
    while start < len(order):
        places = order[start : start + int(random.integers(1, _MOST_MIXED + 1))]
        answers = predictor.predict([rows[place] for place in places])
        for place, answer in zip(places, answers, strict=True):
            answers_of_rows[place] = answer
        start += len(places)
    return answers_of_rows


_ORDERS = {
    "in batches": together,
    "in other batches": answer_mixed_rows,
    "in reversed order": reverse_rows,
}


def forms_of_run(
    predictor: RunPredictor, beside: Sequence[RunPredictor], files: Mapping[str, RunPredictor]
) -> tuple[Form, list[Form]]:
    """The reference, and all forms to compare with it.

    `beside`: the same run on other devices. `files`: the predictors of its exports, by name.
    """
    library = through_library(predictor)
    is_flat = isinstance(predictor.model, Transformer) and predictor.model.is_flat
    layers = "flat" if is_flat else "its own layers"
    reference = Form("alone", predictor, alone)
    forms = [Form(f"{layers}, {name}", predictor, order) for name, order in _ORDERS.items()]
    if library is not predictor:
        reference = Form("the library's layers, alone", library, alone)
        forms.insert(0, Form(f"{layers}, alone", predictor, alone))
        forms.append(Form("padded, in batches", library, together))
    for other in beside:
        name = f"{layers}, on {other.device}"
        in_fp32 = replace(other, precision=Precision.fp32)
        forms.append(Form(f"{name}, fp32", in_fp32, together))
        forms.append(Form(name, other, together, is_exact=False))
    return reference, forms + [_of_file(name, each) for name, each in files.items()]


def forms_of_folder(folder: Path, text: str) -> tuple[Form, list[Form]]:
    """The reference and the forms of a folder of transformers that no run of ours wrote.

    They are transformers row by row and in batches, our flat layers, and the folder's ONNX files.
    """
    require_ordinary(*folder.iterdir())
    plain = FolderPredictor.of_folder(folder, text)
    require(
        has_weights(folder),
        str(folder),
        "no weights (*.safetensors) in it",
        hint="Name its run, with --form.",
    )
    heads = " ".join(map(str, cast(Any, plain.model).config.architectures or ()))
    require(
        "TokenClassification" not in heads,
        str(folder),
        f"its model is a {heads}, and only one that classifies texts is verified without its run",
        hint="Name its run, with --form.",
    )
    who = "transformers"
    if "SequenceClassification" not in heads:
        who = "transformers with a made-up head"
    forms = [Form(f"{who}, {name}", plain, order) for name, order in _ORDERS.items()]
    flat = plain.run_flat()
    if flat is not None:
        orders = {"alone": alone, **_ORDERS}
        forms += [Form(f"flat, {name}", flat, order) for name, order in orders.items()]
    for name, answering in plain.answering(folder).items():
        if name.endswith(".onnx"):
            forms.append(_of_file(name, answering))
    return Form(f"{who}, alone", plain, alone), forms


def _of_file(name: str, predictor: RunPredictor) -> Form:
    file = Path(name)
    has_fewer_bits = name.endswith("16") or (
        file.suffix == ".onnx" and any(mark in file.name for mark in _FEWER_BITS)
    )
    return Form(name, predictor, together, is_exact=not has_fewer_bits)


def through_library(predictor: RunPredictor) -> RunPredictor:
    """A predictor with the same weights in the layers of transformers, which pads its rows.

    Without an encoder it is the predictor itself.
    """
    model = predictor.model
    if not isinstance(model, Transformer):
        return predictor
    plain = plain_model(deepcopy(model))  # LoRA's matrices are merged in place
    padded = outputs_of(model).wrap(plain, Compute.padded, model.separator_id)
    padded.set_windows(model.window, model.joins)
    padded.window_query = model.window_query
    return replace(predictor, model=padded.eval())


def is_transformers_folder(folder: Path) -> bool:
    """Whether a folder is one of transformers, and no run's."""
    try:
        described = load_json(folder / SETTINGS)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(described, dict) and "model_type" in described


@dataclass(slots=True, kw_only=True)
class FolderPredictor(Predictor):
    """A folder of transformers, or an ONNX file in it, for texts."""

    tokenizer: Any
    ask: Ask
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
        own = (net, tokenizer, labels, tokenizer.model_max_length, roles)
        return cls(
            *own, tokenizer=tokenizer, ask=lambda given: net(**given).logits, where=str(folder)
        )

    def answering(self, folder: Path) -> dict[str, RunPredictor]:
        """All that answers from the folder, by name."""
        return {
            name: replace(self, ask=ask, where=name)
            for name, ask in _asks_of(folder, self.model).items()
        }

    def run_flat(self) -> FolderPredictor | None:
        """A predictor with these weights in our flat layers; None for other families."""
        net: Any = deepcopy(self.model)
        if net.config.model_type not in FLAT_FAMILIES:
            return None
        model = Outputs([], "single").wrap(net, Compute.flat, None).eval()

        def ask(tensors: Mapping[str, Tensor]) -> Tensor:
            ids = tensors["input_ids"]
            masks = tensors.get("attention_mask", torch.ones_like(ids)).bool()
            batch = flat_batch([row[mask] for row, mask in zip(ids, masks, strict=True)])
            return model(batch)[batch.rows.argsort()]

        return replace(self, ask=ask)

    @torch.inference_mode()
    def outputs(self, texts: pa.Array) -> Tensor:
        """`[N, C]` logits, in batches in the order of the texts."""
        rows = [text.split(PAIR) for text in texts.to_pylist()]
        num_outputs = self.labels.num_outputs
        blocks = [torch.empty(0, num_outputs)]
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            columns = list(map(list, zip(*rows[start : start + _ROWS_AT_ONCE], strict=True)))
            with read_by("flatout", Path(self.where)):
                answers = self.ask(self.tokenizer(*columns, **_AS_USUAL)).float()
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
    ask: Ask
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
                shares = self.ask(tensors).float().softmax(-1)
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


def texts_of_folder(predictor: Predictor, folder: Path) -> dict[str, RunPredictor]:
    """Predictors of texts from an exported folder of an encoder, by name."""
    opened = FolderPredictor.of_folder(folder)
    of_run = predictor.labels.classes
    labels = opened.labels.classes
    _require_own_labels(predictor, folder, labels)
    opened.roles, opened.label_delimiter = predictor.roles, predictor.label_delimiter
    if predictor.thresholds:
        opened.thresholds = [predictor.thresholds[of_run.index(name)] for name in labels]
    opened.labels = replace(opened.labels, problem=predictor.labels.problem)
    return opened.answering(folder)


def words_of_folder(predictor: Predictor, folder: Path) -> dict[str, RunPredictor]:
    """Predictors of texts from the exported folder of a network on words, by name."""
    files = onnx_files(folder)
    require(bool(files), str(folder), "no ONNX file in it", hint="Name an exported folder.")
    with read_by("tokenizers", folder):
        tokenizer = open_tokenizer(folder)
        labels = load_json(folder / SIGNATURE)["labels"]
    _require_names(labels, folder)
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
            ask=ask_onnx(file),
            where=str(file),
            linear_part=linear_part,
        )
    return predictors


def _require_names(names: object, folder: Path) -> None:
    """Refuse classes that are no list of names."""
    are_names = isinstance(names, list) and bool(names) and all(map(is_name, names))
    require(are_names, str(folder), "its labels are no list of names", hint="Export the run again.")


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


def predictors_of_folder(predictor: RunPredictor, folder: Path) -> dict[str, RunPredictor]:
    """Predictors that answer from a folder, as which a run was exported, by name."""
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
        answering = texts_of_folder if is_encoder else words_of_folder
        return answering(predictor, folder)
    if type(predictor) is TagPredictor:
        net, tokenizer = open_folder(folder, Outputs([], "tags"))
        predictors: dict[str, RunPredictor] = {}
        for name, ask in _asks_of(folder, net).items():
            predictors[name] = FolderTagger(
                model=predictor.model,
                vocabulary=predictor.vocabulary,
                names=names_of(net),
                max_length=predictor.max_length,
                roles=predictor.roles,
                tokenizer=tokenizer,
                ask=ask,
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


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights without pickles; `export --for here` may write only ONNX."""
    return next(folder.glob("*.safetensors"), None) is not None


def open_folder(folder: Path, kind: Outputs) -> tuple[Any, Any]:
    """The model and the tokenizer of a folder, opened by transformers.

    If the folder has only ONNX files, the model has random weights: its configuration is needed.
    """
    from transformers import AutoConfig, AutoTokenizer

    hint = "Name a folder with config.json, model.safetensors and the tokenizer's files."
    has_tokens = any(
        next(folder.glob(name), None) for name in ("tokenizer.json", "vocab.*", "*.model")
    )
    # the library would make an empty one
    require(has_tokens, str(folder), "no tokenizer in it", hint=hint)
    require_complete(folder, str(folder))
    with read_by("transformers", folder, hint), quiet_library():
        torch.manual_seed(0)  # of a head that the folder does not have
        if has_weights(folder) or not onnx_files(folder):
            safe: dict[str, Any] = {"use_safetensors": True, "dtype": torch.float32}
            net = kind.auto_class.from_pretrained(folder, trust_remote_code=False, **safe)
        else:
            net = kind.auto_class.from_config(
                AutoConfig.from_pretrained(folder, trust_remote_code=False)
            )
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    require(
        tokenizer.pad_token is not None, str(folder), "its tokenizer has no token to pad rows with"
    )
    with read_by("transformers", folder, hint):
        _require_names(names_of(net), folder)
    return net.eval(), tokenizer


def names_of(net: Any) -> list[str]:
    return [str(net.config.id2label[number]) for number in range(net.config.num_labels)]


def onnx_files(folder: Path) -> list[Path]:
    """The ONNX files of a folder, which need a package of their own."""
    files = sorted(folder.glob("*.onnx"))
    has_package = find_spec("onnxruntime") is not None
    require(
        not files or has_package,
        str(folder),
        "needs the package onnxruntime for its ONNX file",
        hint="Install it with pip install 'flatout[onnx]'.",
    )
    return files


def _asks_of(folder: Path, net: nn.Module) -> dict[str, Ask]:
    """Each way to ask a folder, by name: its weights in `net`, and its ONNX files."""
    asks: dict[str, Ask] = {}
    if has_weights(folder):
        kept_in = str(load_json(folder / SETTINGS).get("dtype"))
        few_bits = f", {kept_in}" if kept_in.endswith("16") else ""
        asks[f"{folder}: transformers{few_bits}"] = lambda given: net(**given).logits
    for file in onnx_files(folder):
        asks[str(file)] = ask_onnx(file)
    return asks


def ask_onnx(file: Path) -> Ask:
    """A function from the tensors that a tokenizer makes to the logits of an ONNX file."""
    with read_by("onnxruntime", file):
        session = open_onnx(file)
    names = [each.name for each in session.get_inputs()]

    def ask(tensors: Mapping[str, Tensor]) -> Tensor:
        if missing := [name for name in names if name not in tensors]:
            raise UserError(
                str(file),
                f"asks for {', '.join(missing)}, which the tokenizer beside it does not give",
            )
        inputs = {name: tensors[name].numpy() for name in names}
        with read_by("onnxruntime", file):
            return torch.from_numpy(session.run(None, inputs)[0])

    return ask
