"""Logistic regression on vectors of numbers, such as the states of an encoder's layer.

One model for all classes, with a penalty on its squared weights. Vectors are scaled first: each
number has a mean of 0 and a spread of 1 over the rows that are learned from. Texts have a sparser
model, `linear_text.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# penalty on squared weights: a layer has as many numbers as a small table has rows
_SHRINKAGE = 1e-2
_SOLVER_STEPS = 100


def classify(vectors: Tensor, classes: Tensor, judged: Tensor) -> Tensor:
    """The classes of the `judged` vectors by a logistic regression on the other vectors."""
    mean = vectors.mean(0)
    spread = vectors.std(0).clamp_min(1e-6)
    vectors = (vectors - mean) / spread
    judged = (judged - mean) / spread
    weights = torch.zeros(vectors.shape[1], int(classes.max()) + 1, requires_grad=True)
    bias = torch.zeros(weights.shape[1], requires_grad=True)
    solver = torch.optim.LBFGS(
        [weights, bias], max_iter=_SOLVER_STEPS, line_search_fn="strong_wolfe"
    )

    def compute_loss() -> Tensor:
        solver.zero_grad()
        entropy = F.cross_entropy(vectors @ weights + bias, classes)
        loss = entropy + _SHRINKAGE / 2 * weights.square().sum()
        loss.backward()
        return loss

    solver.step(compute_loss)
    with torch.no_grad():
        return (judged @ weights + bias).argmax(1)
