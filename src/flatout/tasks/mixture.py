"""A network and a linear model that answer together, by weights that validation rows choose.

A network that starts from random weights cannot learn from a thousand rows which words matter. A
linear model on words and n-grams can, and misses what only their order tells. So their
log-probabilities are added, each by a weight of its own. Both are fitted on the validation rows.
Few rows say little, so the weights begin where the linear model alone would answer.

Shapes: B rows, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from flatout.data.problem import Problem

# Weights of the network and of the linear model before any row has spoken. A network trained on
# few rows is far too sure of itself; a linear model that counts words is, too, but by less. In 19
# runs on 250 to 1,000 rows the mean probability of an answer was then 1.2 points above the share of
# right ones, and 4.3 with a weight of 1. `_SPREAD`: how far the logarithms of both stray.
_USUAL = np.log([0.05, 0.6])
_SPREAD = 0.5
_FEW_ROWS = 300
# probability that the linear model leaves to the least likely class
_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class Mixture:
    """What logits of the network and log-probabilities of the linear model are multiplied by."""

    network: float
    linear: float
    alone: float = 1.0  # what the network's are multiplied by where it answers alone

    def mix(self, network_BC: Tensor, linear_BC: Tensor) -> Tensor:
        return self.network * network_BC + self.linear * linear_BC


ALONE = Mixture(1.0, 0.0)  # the network without a linear model


@dataclass(frozen=True, slots=True)
class FittedMixture:
    """A mixture, with the mean losses of the rows it was fitted on."""

    mixture: Mixture
    loss: float
    loss_of_network: float  # alone, at its best temperature
    loss_of_linear: float  # alone, as it is
    # Whether to use it: unless the network alone answers as well. Few rows cannot show that, the
    # less so as they have chosen the network's checkpoint.
    helps: bool


def fit_mixture(
    network_BC: Tensor, linear_BC: Tensor, targets_B: Tensor, few_rows: int = _FEW_ROWS
) -> FittedMixture:
    """Fit the weights on rows that neither model was trained on.

    With fewer than `few_rows` of them the linear model is used whatever they say. That is right
    where the network had few rows to learn from.
    """
    nothing_BC = torch.zeros_like(linear_BC)
    mixture = _likeliest(network_BC, linear_BC, targets_B, _USUAL)
    # as sure of itself as it is
    alone = _likeliest(network_BC, nothing_BC, targets_B, np.zeros(2))
    mixed_B = _losses(mixture, network_BC, linear_BC, targets_B)
    alone_B = _losses(alone, network_BC, nothing_BC, targets_B)
    gains_B = alone_B - mixed_B
    # one standard error of the mean gain
    chance = float(gains_B.std(correction=0)) / len(gains_B) ** 0.5
    linear_B = _losses(Mixture(0.0, 1.0), network_BC, linear_BC, targets_B)
    return FittedMixture(
        replace(mixture, alone=alone.network),
        loss=float(mixed_B.mean()),
        loss_of_network=float(alone_B.mean()),
        loss_of_linear=float(linear_B.mean()),
        helps=len(gains_B) < few_rows or float(gains_B.mean()) > chance,
    )


def log_shares(probabilities_BC: NDArray[np.float64], problem: Problem) -> Tensor:
    """Probabilities of a linear model as a network's logits would be: [0.5, 0.5] → [-0.7, -0.7].

    With several labels a row each stands alone: [0.5, 0.9] → [0, 2.2]. Numbers stay as they are.
    """
    if problem is Problem.regression:
        return torch.from_numpy(probabilities_BC).float()
    shares = torch.from_numpy(probabilities_BC).clamp(_LEAST, 1 - _LEAST)
    outputs = shares.logit() if problem is Problem.multi else shares.log()
    return outputs.float()


def _likeliest(
    network_BC: Tensor, linear_BC: Tensor, targets_B: Tensor, usual: NDArray[np.float64]
) -> Mixture:
    """The weights under which the targets are likeliest; few rows hold them near the usual ones.

    `usual`: the logarithms of both weights before any row has spoken.
    """
    from scipy.optimize import minimize

    def loss(logs: NDArray[np.float64]) -> float:
        mixture = _of_logs(logs)
        strays = (logs - usual) / _SPREAD
        losses_B = _losses(mixture, network_BC, linear_BC, targets_B)
        return float(losses_B.sum()) + 0.5 * float(strays @ strays)

    return _of_logs(minimize(loss, usual, method="Nelder-Mead").x)


def _of_logs(logs: NDArray[np.float64]) -> Mixture:
    network, linear = np.exp(logs).tolist()
    return Mixture(network, linear)


def _losses(mixture: Mixture, network_BC: Tensor, linear_BC: Tensor, targets_B: Tensor) -> Tensor:
    mixed_BC = mixture.mix(network_BC, linear_BC)
    return F.cross_entropy(mixed_BC.double(), targets_B, reduction="none")
