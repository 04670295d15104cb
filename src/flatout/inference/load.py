"""What a finished run answers with, loaded from its folder."""

from __future__ import annotations

from pathlib import Path

import torch

from flatout.bits.predictor import GramPredictor
from flatout.engine.precision import Precision
from flatout.errors import UserError
from flatout.inference.folder import ModelFolder
from flatout.inference.tags import TagPredictor
from flatout.inference.text import Predictor


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
) -> Predictor | GramPredictor | TagPredictor:
    """The best model of a run, of whichever kind the run was."""
    problem = ModelFolder.find(run).settings().get("problem")
    predictor: Predictor | GramPredictor | TagPredictor
    if problem == GramPredictor.problem:
        predictor = GramPredictor.load(run, device)
    elif problem == TagPredictor.problem:
        predictor = TagPredictor.load(run, device)
    else:
        predictor = Predictor.load(run, device)
    predictor.precision = precision
    return predictor
