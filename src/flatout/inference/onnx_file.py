"""Write, open and compare ONNX files: what all networks that are exported as one have in common.

`save_onnx` traces a network, `write_signature` says beside the file what its numbers mean, and
`require_close` holds its answers against the run's own. Open this file to change how torch's
exporter is called, or how far apart answers may lie.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatout.errors import UserError, first_line, is_failure, require

ONNX = "model.onnx"
SIGNATURE = "signature.json"
# most that logits may differ; another runtime sums in another order
MOST_APART = 1e-5
# bytes of weights; more lie beside the ONNX file, which may have twice that at most
_MOST_IN_ONE_FILE = 1 << 30
DEFECT = "Nothing was written; please report this with the settings of the model."


def save_onnx(
    model: nn.Module,
    inputs: dict[str, Tensor],
    outputs: list[str],
    free_axes: tuple[object, ...],
    file: Path,
) -> None:
    """Write a model as an ONNX file; `free_axes`: the axes of the inputs that may have any size."""
    with errors_alone("torch.onnx"), warnings.catch_warnings():
        # The exporter warns of torch's own code and of packages that are not needed.
        warnings.filterwarnings("ignore", module=r"(torch|copyreg|onnxscript|transformers)\b")
        # And of a list that torch's own recurrent layers keep, and of what its own generated code
        # calls.
        warnings.filterwarnings(
            "ignore", message="The tensor attributes .*_flat_weights|_check_is_size will be"
        )
        program: Any = torch.onnx.export(
            model,
            tuple(inputs.values()),
            input_names=list(inputs),
            output_names=outputs,
            dynamic_shapes=free_axes,
            dynamo=True,
            verbose=False,
        )
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # paths of this machine, of use to the exporter alone
    weights = sum(weight.nbytes for weight in model.parameters())
    program.save(file, external_data=weights > _MOST_IN_ONE_FILE)


@contextmanager
def errors_alone(name: str | None = None) -> Iterator[None]:
    """Inside it a logger writes errors only; None: all loggers."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def write_signature(folder: Path, signature: dict[str, Any]) -> None:
    """Write the names and shapes of an ONNX file, and what its numbers mean, beside it."""
    text = json.dumps(signature, ensure_ascii=False, indent=1)
    (folder / SIGNATURE).write_text(text, encoding="utf-8")


def keep_onnxruntime_silent() -> None:
    """Let onnxruntime send nothing to its makers; to be called before it is imported.

    It would also keep a number of this machine below the home folder.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def open_onnx(path: Path) -> Any:
    keep_onnxruntime_silent()
    from onnxruntime import InferenceSession

    return InferenceSession(path, providers=["CPUExecutionProvider"])


@contextmanager
def read_by(library: str, file: Path, hint: str = "Export the run again.") -> Iterator[None]:
    """Say of a file that a library cannot read what is wrong with it."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # no narrower class: each library raises, or panics with, whatever a damaged file makes it
        if not is_failure(error):
            raise
        raise UserError(
            str(file), f"{library} cannot read it ({first_line(error)})", hint=hint
        ) from None


def require_close(
    values: Tensor, expected: Tensor, who: str, most: float, name: str = "logits"
) -> float:
    """The largest difference, which must not be above `most`.

    It is a share of the largest value where that is above 1: numbers of a regression may be large.
    """
    largest = expected.abs().max().clamp_min(1)
    apart = float((values - expected).abs().max() / largest)
    require(
        apart <= most,
        "export",
        f"{who} answers otherwise: {name} differ by {apart:.1e}",
        hint=DEFECT,
    )
    return apart
