"""Settings of tuning: which open settings are measured before training, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from flatout.errors import check_settings, did_you_mean, require, setting

_OFF = "To measure nothing, set tune=off."
MODES = ("off", "auto")
INSTEAD_OF_CUT = "python -m flatout probe scores layers and names the cut; set model.freeze_layers."
StepRows = StrEnum("StepRows", "kept free")


@dataclass(kw_only=True, slots=True)
class TuneConfig:
    """Settings that are left open are measured before training, in separate processes."""

    enabled: bool = setting(False, "Whether anything is measured.", example="tune=auto")
    feed: bool = setting(True, "Whether to look for the fastest feed, where data.feed=auto.")
    precision: bool = setting(
        True, "Whether to look for the fastest arithmetic, where precision=auto."
    )
    batch_size: bool = setting(
        True, "Whether to look for the fastest number of rows at once, where none is typed."
    )
    learning_rate: bool = setting(
        False, "Whether to look for a learning rate by a range test; it is then used."
    )
    compile: bool = setting(
        True, "Whether to see if compiling the model pays within the run, where it is not typed."
    )
    effective_batch: StepRows = setting(
        StepRows.kept,
        "Rows of an optimizer step: kept as they are set, or free to grow, which changes what is"
        " learnt.",
    )
    budget_s: float = setting(60.0, "Most seconds that measuring may take.", above=0, hint=_OFF)
    share: float = setting(
        0.05, "Share of the expected time measuring may take; 1: all of it.", above=0, hint=_OFF
    )
    memory_margin: float = setting(
        0.1, "Share of the free memory that is left alone.", least=0, below=1
    )
    gain: float = setting(
        0.05, "By how much faster something must be to be taken; noise is less.", least=0, below=1
    )
    steps: int = setting(
        8, "Steps of a probe behind its first ones; fewer where time is short.", least=2
    )
    loss_tolerance: float = setting(
        0.01, "By what share an arithmetic's loss may differ from that of fp32.", above=0
    )
    fresh: bool = setting(False, "Whether to repeat earlier measurements.")

    def __post_init__(self) -> None:
        check_settings(self, "tune")


def tune_of(word: str) -> TuneConfig:
    """The settings that `tune=off` and `tune=auto` stand for; for use in Python."""
    hint = INSTEAD_OF_CUT if word == "cut" else did_you_mean(word, MODES)
    require(word in MODES, "tune", repr(word), allowed=", ".join(MODES), hint=hint)
    return TuneConfig(enabled=word == "auto")


def is_typed(key: str, overrides: Sequence[str]) -> bool:
    """Whether an override of the command line sets this key: `+tune.gain=0.1` sets `tune.gain`."""
    return any(word.lstrip("+~").partition("=")[0] == key for word in overrides)
