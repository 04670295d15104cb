"""How long optimizer steps take: a constant, and a part for each token that is computed.

The plan says how many tokens each step computes. Moments of a run say how many steps were done
after how many seconds. Two numbers are fitted to them, and a spread says how sure they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flatout.data.batches.feed import Feed
from flatout.data.batches.plan import BatchLayout

Floats = NDArray[np.float64]
_MOST_BATCHES = 50_000  # of an epoch that are looked at; longer epochs have steps of like size
_MOST_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Work:
    """The planned optimizer steps of a run. The first epoch stands for all."""

    total_steps: int
    ends: Floats  # tokens computed after 0, 1, 2, … steps of an epoch
    padding_share: float = 0.0

    @staticmethod
    def of(feed: Feed | None, total_steps: int, steps_an_epoch: int) -> Work:
        """The work of a feed; without one, or of a very long epoch, all steps are alike."""
        steps_an_epoch = max(1, steps_an_epoch)
        if feed is None or steps_an_epoch * feed.plan.accumulate > _MOST_BATCHES:
            return Work(total_steps, np.arange(steps_an_epoch + 1, dtype=np.float64))
        rows, tokens, longest = feed.planned_sizes(steps_an_epoch * feed.plan.accumulate)
        computed = rows * longest if feed.plan.layout is BatchLayout.padded else tokens
        of_steps = np.add.reduceat(computed, np.arange(0, len(computed), feed.plan.accumulate))
        ends = np.concatenate(([0.0], np.cumsum(of_steps, dtype=np.float64)))
        return Work(total_steps, ends, 1 - float(tokens.sum()) / max(1.0, float(ends[-1])))

    def up_to(self, step: int) -> float:
        """Tokens computed in the first `step` steps of the run."""
        epochs, rest = divmod(step, len(self.ends) - 1)
        return float(epochs * self.ends[-1] + self.ends[rest])

    @property
    def total(self) -> float:
        return self.up_to(self.total_steps)


@dataclass(frozen=True, slots=True)
class StepPace:
    """Seconds of steps, fitted to some of them."""

    step_s: float
    token_s: float
    spread: float  # relative standard error of a sum of many steps

    def seconds(self, steps: float, tokens: float) -> float:
        return self.step_s * steps + self.token_s * tokens


@dataclass(frozen=True, slots=True)
class Moment:
    """How far a run was after so many seconds of steps."""

    step: int
    seconds: float


def fit_pace(work: Work, moments: Sequence[Moment]) -> StepPace | None:
    """The pace between the first moment and the last; None if no step lies between them."""
    pairs = [pair for pair in itertools.pairwise(moments) if pair[1].step > pair[0].step]
    if not pairs:
        return None
    seconds = np.array([after.seconds - before.seconds for before, after in pairs])
    steps = np.array([after.step - before.step for before, after in pairs], np.float64)
    tokens = np.array([work.up_to(after.step) - work.up_to(before.step) for before, after in pairs])
    columns = np.stack([steps, tokens], axis=1)
    factors = _fit_positive(columns, seconds, 1 / np.sqrt(steps))
    fitted = columns @ factors
    # A long step counts in full: what is predicted is a sum, and so is what was measured.
    factors *= seconds.sum() / max(float(fitted.sum()), 1e-12)
    step_s, token_s = map(float, factors)
    return StepPace(step_s, token_s, _spread(seconds, columns @ factors))


def _fit_positive(columns: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Least squares of `columns @ factors = seconds` with two factors of 0 or more."""
    scaled = columns * weights[:, None]
    wanted = seconds * weights
    factors = np.asarray(np.linalg.lstsq(scaled, wanted, rcond=1e-6)[0], np.float64)
    if (factors >= 0).all():
        return factors
    # A constant or a price of a token below zero has no meaning: one of the two explains all.
    alone = []
    for index in range(2):
        column = scaled[:, index]
        single = np.zeros(2)
        single[index] = column @ wanted / max(float(column @ column), 1e-12)
        alone.append(single)
    return min(alone, key=lambda single: float(np.square(scaled @ single - wanted).sum()))


def _spread(seconds: Floats, fitted: Floats) -> float:
    """Relative standard error of the fitted sum, from blocks of consecutive moments.

    Blocks, as a machine that other processes slow down is slow for some seconds on end.
    """
    num_blocks = min(_MOST_BLOCKS, len(seconds))
    if num_blocks < 2:
        return 0.5
    blocks = np.array_split(np.arange(len(seconds)), num_blocks)
    ratios = [seconds[block].sum() / max(float(fitted[block].sum()), 1e-12) for block in blocks]
    error = float(np.std(ratios, ddof=1)) / math.sqrt(num_blocks)
    # few blocks know their own spread badly: about Student's factor over that of many
    return error * (1 + 1.5 / (num_blocks - 1))
