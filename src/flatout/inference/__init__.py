"""What a finished run answers with, loaded from its folder."""

from __future__ import annotations

from pathlib import Path

import torch

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
    "load_predictor",
]


def load_predictor(run: str | Path, device: str | torch.device = "cpu") -> Predictor | GramPredictor | TagPredictor:
    """The best model of a run, of whichever kind the run was."""
    problem = ModelFolder.find(run).settings().get("problem")
    if problem == GramPredictor.problem:
        return GramPredictor.load(run, device)
    return TagPredictor.load(run, device) if problem == TagPredictor.problem else Predictor.load(run, device)
