"""Forms of one model: its own layers, the library's layers, a folder of transformers, an ONNX file.

`verify` compares them. Each form is a predictor, so whatever asks a run can ask it too. The
reference is fp32 on the CPU, each row alone. For an encoder, the reference goes through the
library's own layers: it shares no attention, padding or batch with the forms that are judged. Open
this file to add a form of a run, or an order in which rows are asked. `folder_predictors.py`
answers from exported folders, and `folder_forms.py` lists the forms of a folder without a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flatout.engine.precision import Precision
from flatout.inference.export import outputs_of, plain_model
from flatout.inference.run_predictor import RunPredictor
from flatout.models.encoder.transformer import Compute, Transformer, quiet_library

_MOST_MIXED = 40  # rows of a batch, when batches are of random sizes
_FEWER_BITS = ("int8", "quant", "16")  # in the name of an ONNX file: its numbers are inexact


@dataclass(frozen=True, slots=True)
class Form:
    """A predictor, and the way in which it gets its rows: alone, in batches, in another order."""

    name: str
    predictor: RunPredictor
    order: Callable[[RunPredictor, list[Any]], list[Any]]
    # whether numbers must be near those of fp32, too; else answers alone are compared
    is_exact: bool = True

    def answers(self, rows: list[Any]) -> list[Any]:
        with quiet_library():
            return self.order(self.predictor, rows)


def alone(predictor: RunPredictor, rows: list[Any]) -> list[Any]:
    return [predictor.predict([row])[0] for row in rows]


def together(predictor: RunPredictor, rows: list[Any]) -> list[Any]:
    return predictor.predict(rows)


def reverse_rows(predictor: RunPredictor, rows: list[Any]) -> list[Any]:
    return predictor.predict(rows[::-1])[::-1]


def answer_mixed_rows(predictor: RunPredictor, rows: list[Any], seed: int = 0) -> list[Any]:
    """Ask in random order and batches of random sizes: neighbours of a row must not matter."""
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


ORDERS = {
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
    forms = [Form(f"{layers}, {name}", predictor, order) for name, order in ORDERS.items()]
    if library is not predictor:
        reference = Form("the library's layers, alone", library, alone)
        forms.insert(0, Form(f"{layers}, alone", predictor, alone))
        forms.append(Form("padded, in batches", library, together))
    for other in beside:
        name = f"{layers}, on {other.device}"
        in_fp32 = replace(other, precision=Precision.fp32)
        forms.append(Form(f"{name}, fp32", in_fp32, together))
        forms.append(Form(name, other, together, is_exact=False))
    return reference, forms + [form_of_file(name, exported) for name, exported in files.items()]


def form_of_file(name: str, predictor: RunPredictor) -> Form:
    """The form of an exported file; its name says whether it has fewer bits than fp32."""
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
