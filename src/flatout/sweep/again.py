"""A sweep's command as you type it: words go into Hydra's by `SHORT`, and come back from them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

SHORT = {
    "trials": "hydra.sweeper.trials",
    "for": "hydra.sweeper.time",
    "sampler": "hydra.sweeper.sampler",
    "pruner": "hydra.sweeper.pruner",
    "metric": "hydra.sweeper.metric",
    "confirm": "hydra.sweeper.confirm",
    "parallel": "hydra.launcher.parallel",
    "trial_for": "hydra.launcher.limit",
}
"""Words of `python -m flatout sweep`, and the settings they stand for."""
_LONG = {setting: word for word, setting in SHORT.items()}


def command_of_sweep(typed: Sequence[str], conf: str | None = None) -> str:
    """A line to copy that begins a sweep of these words; they may be Hydra's. `conf` is what `--config-dir` names."""
    shown = [word for word in typed if word != "hydra/sweeper=flatout"]
    short = [in_short(word) for word in shown if in_short(word) != word]  # Hydra hands on its own words first
    options = [] if conf is None else ["--config-dir", conf]
    settings = [word for word in shown if in_short(word) == word]
    return shlex.join(["python", "-m", "flatout", "sweep", *options, *settings, *short])


def in_short(word: str) -> str:
    """A word of Hydra's command line as the sweep command knows it; any other unchanged."""
    key, equals, value = word.partition("=")
    return f"{_LONG[key]}={value}" if equals and key in _LONG else word
