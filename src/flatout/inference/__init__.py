"""What a finished run answers with, loaded from its folder."""

from __future__ import annotations

from pathlib import Path

import torch

from flatout.inference.folder import ModelFolder
from flatout.inference.grams import GramPrediction, GramPredictor
from flatout.inference.text import Prediction, Predictor

__all__ = ["GramPrediction", "GramPredictor", "Prediction", "Predictor", "load_predictor"]


def load_predictor(run: str | Path, device: str | torch.device = "cpu") -> Predictor | GramPredictor:
    """The best model of a run, of whichever kind the run was."""
    is_grams = ModelFolder.find(run).settings().get("problem") == GramPredictor.problem
    return (GramPredictor if is_grams else Predictor).load(run, device)
