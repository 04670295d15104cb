"""`data=stars task=stars`: reviews with one to five stars, learned as a number.

A large mistake counts as its size and not as its square, so one wrong review pulls the others less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from flatout.data.problem import Problem
from flatout.data.texts.data import TextData
from flatout.data.texts.settings import TextDataConfig
from flatout.run.kinds import TEXTS
from flatout.tasks import Classifier
from flatout.tasks.classification import ClassificationConfig


@dataclass(kw_only=True, slots=True)
class StarsConfig(TextDataConfig):
    """Settings of the data: those of texts, with other defaults."""

    text: str | None = "review"
    label: str | None = "stars"
    problem: Problem = Problem.regression


class StarsData(TextData):
    """The DataModule of texts, with these settings."""

    settings = StarsConfig


@dataclass(kw_only=True, slots=True)
class StarsTaskConfig(ClassificationConfig):
    """Settings of the loss."""

    bend: float = 0.5  # the mistake, in standard deviations, from which its size counts


class StarsTask(Classifier):
    """Trains with the smooth absolute error."""

    settings = StarsTaskConfig

    def sum_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # as in the task of flatout, numbers are learned in standard deviations
        scaled = (targets - self.labels.mean) / self.labels.spread
        answers = outputs.squeeze(1)
        bend = self.config.bend
        return nn.functional.smooth_l1_loss(answers, scaled, beta=bend, reduction="sum")


STARS = replace(
    TEXTS,
    settings=StarsConfig,
    data_option="stars",
    problems=(),
    data=StarsData,
    task=StarsTask,
    task_option="stars",
    rows="reviews",
    usual_metric=lambda config: "mae",
    mixes_ngrams=False,
)
