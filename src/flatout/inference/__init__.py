"""What a finished run answers with, loaded from its folder."""

from __future__ import annotations

from pathlib import Path

import torch

from flatout.errors import UserError
from flatout.inference.folder import ModelFolder
from flatout.inference.grams import GramPrediction, GramPredictor
from flatout.inference.tags import Entity, TagPrediction, TagPredictor
from flatout.inference.text import Prediction, Predictor

__all__ = [
    "Entity",
    "GramPrediction",
    "GramPredictor",
    "Prediction",
    "Predictor",
    "TagPrediction",
    "TagPredictor",
    "answering_device",
    "load_predictor",
]


def answering_device(name: str = "auto") -> torch.device:
    """The device of that name; auto: a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = torch.cuda.device_count()
    known = ["cpu", *(["cuda"] if count else []), *(f"cuda:{number}" for number in range(count))]
    if name not in known:
        raise UserError("--device", f"no device {name!r} here", allowed=", ".join(["auto", *known]))
    return torch.device(name)


def load_predictor(run: str | Path, device: str | torch.device = "cpu") -> Predictor | GramPredictor | TagPredictor:
    """The best model of a run, of whichever kind the run was."""
    problem = ModelFolder.find(run).settings().get("problem")
    if problem == GramPredictor.problem:
        return GramPredictor.load(run, device)
    return TagPredictor.load(run, device) if problem == TagPredictor.problem else Predictor.load(run, device)
