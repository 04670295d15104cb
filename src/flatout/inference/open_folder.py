"""An exported folder, opened: the model and tokenizer of transformers, and its ONNX files.

The folder may come from others. So weights are read without pickles, no code in it runs, and what
does not open is refused in one sentence. Open this file to change which files of a folder are read.
`folder_predictors.py` answers rows with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatout.data.tables.hub import offline_without_network, require_complete
from flatout.errors import UserError, require
from flatout.files import load_json
from flatout.inference.model_folder import SETTINGS
from flatout.inference.onnx_file import open_onnx, read_by
from flatout.inference.records import is_name
from flatout.models.encoder.transformer import Outputs, quiet_library, require_no_code

# From the tensors that a tokenizer makes of a batch, padded, to the logits of the network.
LogitsOf = Callable[[Mapping[str, Tensor]], Tensor]


def is_transformers_folder(folder: Path) -> bool:
    """Whether a folder is one of transformers, and no run's."""
    try:
        described = load_json(folder / SETTINGS)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(described, dict) and "model_type" in described


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
    with (
        read_by("transformers", folder, hint),
        quiet_library(),
        offline_without_network(is_here=True),
    ):
        described = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        require_no_code(described, str(folder))
        torch.manual_seed(0)  # of a head that the folder does not have
        if has_weights(folder) or not onnx_files(folder):
            safe: dict[str, Any] = {"use_safetensors": True, "dtype": torch.float32}
            net = kind.auto_class.from_pretrained(folder, trust_remote_code=False, **safe)
        else:
            net = kind.auto_class.from_config(described)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        can_pad = tokenizer.pad_token is not None
    require(can_pad, str(folder), "its tokenizer has no token to pad rows with")
    with read_by("transformers", folder, hint):
        require_names(names_of(net), folder)
    return net.eval(), tokenizer


def names_of(net: Any) -> list[str]:
    return [str(net.config.id2label[number]) for number in range(net.config.num_labels)]


def require_names(names: object, folder: Path) -> None:
    """Refuse classes that are no list of names."""
    are_names = isinstance(names, list) and bool(names) and all(map(is_name, names))
    require(are_names, str(folder), "its labels are no list of names", hint="Export the run again.")


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


def logits_of_folder(folder: Path, net: nn.Module) -> dict[str, LogitsOf]:
    """What makes logits in a folder, by name: its weights, which `net` has, and ONNX files."""
    logits_by_name: dict[str, LogitsOf] = {}
    if has_weights(folder):
        kept_in = str(load_json(folder / SETTINGS).get("dtype"))
        few_bits = f", {kept_in}" if kept_in.endswith("16") else ""
        logits_by_name[f"{folder}: transformers{few_bits}"] = lambda given: net(**given).logits
    for file in onnx_files(folder):
        logits_by_name[str(file)] = logits_of_onnx(file)
    return logits_by_name


def logits_of_onnx(file: Path) -> LogitsOf:
    """A function from the tensors that a tokenizer makes to the logits of an ONNX file."""
    with read_by("onnxruntime", file):
        session = open_onnx(file)
    names = [tensor.name for tensor in session.get_inputs()]

    def logits_of(tensors: Mapping[str, Tensor]) -> Tensor:
        if missing := [name for name in names if name not in tensors]:
            raise UserError(
                str(file),
                f"asks for {', '.join(missing)}, which the tokenizer beside it does not give",
            )
        inputs = {name: tensors[name].numpy() for name in names}
        with read_by("onnxruntime", file):
            return torch.from_numpy(session.run(None, inputs)[0])

    return logits_of
