"""Draw no settings twice in a sweep while others are untried.

Any sampler may draw the settings of an earlier trial, which would train the same run again. Of a
space with few settings, `model.hidden=choice(16,32)`, that is likely. `UntriedSampler` draws as
another sampler does, and replaces a value below which all settings have been tried.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from flatout.sweep.space import Space

_MOST_LISTED = 10_000  # values; of an interval with more the same one is hardly drawn twice


class UntriedSampler(BaseSampler):
    """The sampler of one trial and one setting; see this file's docstring."""

    # Settings are drawn one after the other. Of hidden=16, 32 and layers=1, 2 these were tried:
    #
    #     hidden=16 layers=1
    #     hidden=16 layers=2
    #     hidden=32 layers=1
    #
    # Below hidden=16 nothing is left, so it becomes 32. Then layers=1 becomes 2.

    def __init__(self, drawing: BaseSampler, study: optuna.Study, space: Space, seed: int) -> None:
        """`study` has all trials; those that Optuna hands to a sampler may be a part."""
        self.drawing = drawing
        self.study = study
        self.space = space
        self.random = np.random.default_rng(seed)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self.drawing.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        drawn = self.drawing.sample_relative(study, trial, search_space)
        chosen = dict(trial.params)
        for key in self.space:
            if key in drawn:
                drawn[key] = self._choose(trial, chosen, key, drawn[key])
                chosen[key] = drawn[key]
        return drawn

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        value = self.drawing.sample_independent(study, trial, param_name, param_distribution)
        return self._choose(trial, trial.params, param_name, value)

    def _choose(
        self, trial: FrozenTrial, chosen: Mapping[str, object], key: str, drawn: object
    ) -> object:
        """The value that was drawn, or another one below which some settings are untried."""
        part = self.space[key]
        keys = list(self.space)
        before = keys[: keys.index(key)]
        num_below = math.prod(self.space[other].num_values for other in keys[len(before) + 1 :])
        tried = self._count_tried(trial, chosen, [*before, key])
        if tried.get(part.text(drawn), 0) < num_below or part.num_values > _MOST_LISTED:
            return drawn
        left = [value for value in part.listed(key) if tried.get(part.text(value), 0) < num_below]
        return left[self.random.integers(len(left))] if left else drawn

    def _count_tried(
        self, trial: FrozenTrial, chosen: Mapping[str, object], keys: list[str]
    ) -> dict[str, int]:
        """How many different settings were tried with each value of the last of these keys.

        Counted are those that have the `chosen` values of the keys before it.
        """
        # Only earlier trials count: a trial that is drawn again after a sweep was killed then draws
        # the same.
        settings = set()
        varied = [key for key in keys[:-1] if self.space[key].num_values > 1]
        for other in self.study.get_trials(deepcopy=False):
            is_earlier = other.number < trial.number and self.space.keys() <= other.params.keys()
            if is_earlier and all(other.params[key] == chosen.get(key) for key in varied):
                texts = [part.text(other.params[key]) for key, part in self.space.items()]
                settings.add(tuple(texts))
        last = len(keys) - 1
        counts: dict[str, int] = {}
        for setting in settings:
            counts[setting[last]] = counts.get(setting[last], 0) + 1
        return counts
