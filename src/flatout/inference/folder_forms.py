"""Forms of a folder of transformers that no run of ours wrote, for `verify` to compare.

The reference is transformers itself, row by row. Open this file to add a form of such a folder;
forms of a run stand in `forms.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from flatout.errors import require
from flatout.files import require_ordinary
from flatout.inference.folder_predictors import FolderPredictor
from flatout.inference.forms import ORDERS, Form, alone, form_of_file
from flatout.inference.open_folder import has_weights


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
    forms = [Form(f"{who}, {name}", plain, order) for name, order in ORDERS.items()]
    flat = plain.run_flat()
    if flat is not None:
        orders = {"alone": alone, **ORDERS}
        forms += [Form(f"flat, {name}", flat, order) for name, order in orders.items()]
    for name, predictor in plain.predictors_of(folder).items():
        if name.endswith(".onnx"):
            forms.append(form_of_file(name, predictor))
    return Form(f"{who}, alone", plain, alone), forms
