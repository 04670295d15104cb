"""A network on bit strings as ONNX: packed bits in, probabilities of 2-grams out.

Bits are packed as numpy packs them (`np.packbits`): the first of a record is the highest bit of its
first byte. Ridge's vote is part of the file, so its answers are those of `predict`. In
`signature.json` stand names, shapes, grams and the threshold. Answers to made-up records must equal
the run's own.

Shapes: B records, W bytes of a record, D = 8W bits, C grams.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from flatout.bits.encodings import Packed, Sets
from flatout.bits.info import GramLabels
from flatout.bits.ridge import finished_answers
from flatout.inference.onnx_file import (
    MOST_APART,
    ONNX,
    open_onnx,
    require_close,
    save_onnx,
    write_signature,
)

_RECORDS = 64
_BITS = "bits"
_BIT_VALUES = [128, 64, 32, 16, 8, 4, 2, 1]


class BitsRun(Protocol):
    """What an export asks of the predictor of a network on bit strings."""

    model: nn.Module
    labels: GramLabels
    num_inputs: int
    threshold: float

    def outputs(self, encodings: Packed | Sets) -> Tensor: ...


def export_bits(predictor: BitsRun, folder: Path) -> list[str]:
    """Write the ONNX file of a run into a folder that is there; lines to print."""
    network = _PackedBits(predictor).eval()
    num_bytes = predictor.num_inputs // 8
    inputs = {_BITS: torch.zeros(2, num_bytes, dtype=torch.uint8)}
    save_onnx(network, inputs, ["probabilities"], ({0: "rows"},), folder / ONNX)
    signature: dict[str, Any] = {
        "inputs": {_BITS: ["rows", num_bytes]},
        "outputs": ["probabilities"],
        "labels": list(predictor.labels.names),
        "threshold": predictor.threshold,
    }
    write_signature(folder, signature)
    apart = _compare(predictor, folder / ONNX)
    return [
        f"input {_BITS}, {num_bytes} bytes a row; output probabilities of"
        f" {predictor.labels.num_outputs:,} grams",
        f"{ONNX}: largest difference from the run's own probabilities: {apart:.1e} on {_RECORDS}"
        " made-up rows",
    ]


def ask_bits(file: Path, records: Packed) -> Tensor:
    """`[B, C]` probabilities, as an exported file answers."""
    (found,) = open_onnx(file).run(None, {_BITS: np.ascontiguousarray(records)})
    return torch.from_numpy(found)


class _PackedRows:
    """What a network on bit strings reads of a batch."""

    def __init__(self, bytes_BW: Tensor) -> None:
        self.bytes_BW = bytes_BW

    def bits(self, dtype: torch.dtype) -> Tensor:
        # By masks: onnxruntime refuses what torch's exporter makes of a shift of bytes.
        values_8 = torch.tensor(_BIT_VALUES, dtype=torch.uint8)
        return self.bytes_BW.unsqueeze(-1).bitwise_and(values_8).ne(0).flatten(1).to(dtype)


class _PackedBits(nn.Module):
    def __init__(self, predictor: BitsRun) -> None:
        super().__init__()
        self.model = predictor.model.cpu()
        self.num_outputs = predictor.labels.num_outputs

    def forward(self, bytes_BW: Tensor) -> Tensor:
        rows: Any = _PackedRows(bytes_BW)
        return finished_answers(self.model, self.num_outputs, rows).sigmoid()


def _compare(predictor: BitsRun, file: Path) -> float:
    """The largest difference between the file's probabilities and the run's own."""
    # From no bit to all bits.
    random = np.random.default_rng(0)
    fractions = np.linspace(0, 1, _RECORDS).reshape(-1, 1)
    records = np.packbits(random.random((_RECORDS, predictor.num_inputs)) < fractions, axis=1)
    expected = predictor.outputs(records)
    alone = _RECORDS // 2
    found = torch.cat([ask_bits(file, records), ask_bits(file, records[alone : alone + 1])])
    expected = torch.cat([expected, expected[alone : alone + 1]])
    return require_close(found, expected, ONNX, MOST_APART, "probabilities")
