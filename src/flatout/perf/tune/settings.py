"""What is measured before training, and how long that may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from flatout.errors import as_choice, did_you_mean, require


class StepRows(StrEnum):
    """Whether the rows of an optimizer step may change."""

    kept = "kept"
    free = "free"


@dataclass(kw_only=True, slots=True)
class TuneConfig:
    """What is left open is measured here before training, in processes that are thrown away."""

    enabled: bool = False
    """Whether anything is measured."""
    feed: bool = True
    """Whether to look for the fastest feed, where data.feed=auto."""
    precision: bool = True
    """Whether to look for the fastest arithmetic, where precision=auto."""
    batch_size: bool = True
    """Whether to look for the fastest number of rows computed at once, where none is typed."""
    learning_rate: bool = False
    """Whether to look for a learning rate by a range test; it is then used."""
    compile: bool = True
    """Whether to see if compiling the model pays within the run, where it is not typed."""
    effective_batch: StepRows = StepRows.kept
    """Rows of an optimizer step: kept as they are set, or free to grow, which changes what is learnt."""
    budget_s: float = 60.0
    """Most seconds that measuring may take."""
    share: float = 0.05
    """Most of the expected run's time that measuring may take; above 1 where a short run shall be measured too."""
    memory_margin: float = 0.1
    """Share of the free memory that is left alone."""
    gain: float = 0.05
    """By how much faster something must be to be taken in another's place; noise is less."""
    steps: int = 8
    """Optimizer steps of each probe, warming up apart; more where they are quick, fewer where the time is short."""
    loss_tolerance: float = 0.01
    """By how much the loss of an arithmetic may differ from that of fp32 on the same rows, as a share of it."""
    fresh: bool = False
    """Whether to repeat earlier measurements."""

    def __post_init__(self) -> None:
        self.effective_batch = as_choice(StepRows, self.effective_batch, "tune.effective_batch")
        require(self.budget_s > 0, "tune.budget_s", f"{self.budget_s:g}", allowed="above 0", hint=_OFF)
        require(self.share > 0, "tune.share", f"{self.share:g}", allowed="above 0", hint=_OFF)
        require(0 <= self.memory_margin < 1, "tune.memory_margin", f"{self.memory_margin:g}", allowed="0 to below 1")
        require(0 <= self.gain < 1, "tune.gain", f"{self.gain:g}", allowed="0 to below 1")
        require(self.steps >= 2, "tune.steps", f"{self.steps}", allowed="2 or more")
        require(self.loss_tolerance > 0, "tune.loss_tolerance", f"{self.loss_tolerance:g}", allowed="above 0")


_OFF = "To measure nothing, set tune=off."
MODES = ("off", "auto")


def tune_of(word: str) -> TuneConfig:
    """What `tune=off` and `tune=auto` stand for, for those who write it in Python."""
    require(word in MODES, "tune", repr(word), allowed=", ".join(MODES), hint=did_you_mean(word, MODES))
    return TuneConfig(enabled=word == "auto")


def is_typed(key: str, overrides: Sequence[str]) -> bool:
    """Whether the command line names a setting."""
    return any(word.lstrip("+~").partition("=")[0] == key for word in overrides)
