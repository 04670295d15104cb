"""One cause of lost time, in words and for `summary.json`, and the gain of what removes it.

A fix is recommended only where even the lower bound of its gain is worth it. Otherwise only the
cause stands. Each gain is an interval: how many times as fast a run would be, from parts that a fix
removes, or from ways that were tried. Its inner part is the spread of what was measured. Around
that lies what earlier predictions missed by when they were confirmed (`bench doctor`): steps timed
apart are not quite the steps of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from flatout.perf.measure.intervals import SpeedupInterval
from flatout.perf.verdict.evidence import LEAST_GAIN, LEAST_UNCERTAIN, MODEL, Evidence, Tried

RECOMMENDED = 1.05  # what the lower bound of a gain must exceed
# from where on a run that has just begun says so
_PLAIN_GAIN = 1.25
_PLAIN_SHARE = 0.5
# how far a prediction may miss, in logarithms: at least; for a gain's logarithm
_MISSED = 0.06
_MISSED_OF_GAIN = 0.1
# by how much steps that nothing interrupts may be quicker than between callbacks: threads stay
# awake
_QUICKER = 0.25


@dataclass(frozen=True, slots=True)
class VerdictFinding:
    cause: str
    limit: str  # in words, as they stand after "limited by"
    share: float  # of the time, what it takes
    evidence: str
    _: KW_ONLY
    override: str | None = None  # what to type, where that removes the cause
    advice: str | None = None  # what to do where no override does it
    # how many times as fast the run would be, where that was measured
    gain: SpeedupInterval | None = None
    # whether `share` is how often it was seen, not what it costs: known gains come first
    is_only_seen: bool = False
    # whether its fix changes what is learned: it takes more to name it first
    changes_training: bool = False
    # whether it stands after all else, as a choice of the reader's, never the verdict
    comes_last: bool = False
    # whether others have the cores: these are not there, whatever else holds the run back
    takes_cores: bool = False

    @property
    def is_recommended(self) -> bool:
        """Whether the fix makes the run faster at its lower bound, too."""
        return self.gain is not None and self.gain.low > RECOMMENDED

    @property
    def fix(self) -> str | None:
        """What to do; an override that is only worth a try says so."""
        if self.override is None:
            return self.advice
        if self.is_recommended:
            return self.override
        return f"try {self.override}" if self.gain is None or self.gain.high > RECOMMENDED else None

    def in_words(self, say: Callable[[str], str]) -> VerdictFinding:
        """The same with another way of writing its override and its advice."""
        return replace(
            self,
            override=self.override and say(self.override),
            advice=self.advice and say(self.advice),
        )

    def sentence(self) -> str:
        text = f"limited by {self.limit}: {self.share:.0%} of the time"
        if self.override and self.is_recommended:
            text += f"; {self.override} would make this run ≈ {self.gain} as fast"
        elif self.fix and self.is_recommended:
            text += f"; {self.fix}: the run would be ≈ {self.gain} as fast"
        elif self.fix and self.gain:
            text += f"; {self.fix}: {self.gain} measured, too uncertain to promise"
        elif self.fix:
            text += f"; {self.fix}" + (" (untested)" if self.override else "")
        return f"{text} ({self.evidence})"

    def as_dict(self) -> dict[str, Any]:
        gain = self.gain if self.is_recommended else None
        return {
            "cause": self.cause,
            "limit": self.limit,
            "share": round(self.share, 4),
            "fix": self.fix,
            "override": self.override,
            "gain": None if gain is None else round(gain.value, 3),
            "gain_low": None if gain is None else round(gain.low, 3),
            "gain_high": None if gain is None else round(gain.high, 3),
            "evidence": self.evidence,
            "sentence": self.sentence(),
        }

    @property
    def worth(self) -> float:
        """Its gain, or what would be gained if all of its share went."""
        return (
            self.gain.value if self.is_recommended and self.gain else 1 / max(1e-3, 1 - self.share)
        )

    @property
    def weight(self) -> float:
        """What decides which cause comes first."""
        if self.takes_cores:
            return 1 / (1 - min(self.share, _PLAIN_SHARE))
        if self.gain is None and self.is_only_seen:
            return LEAST_GAIN
        return math.sqrt(self.worth) if self.changes_training else self.worth

    @property
    def is_plain(self) -> bool:
        """Whether it costs so much that the run reports it at once: you can still end
        and fix it.
        """
        return (
            self.share >= _PLAIN_SHARE
            if self.gain is None and self.is_only_seen
            else self.worth >= _PLAIN_GAIN
        )


def carried_over(value: float, low: float, high: float) -> SpeedupInterval:
    """A gain of steps as the gain of a run: the bounds with what predictions miss by."""
    missed = math.exp(_MISSED + _MISSED_OF_GAIN * abs(math.log(value)))
    return SpeedupInterval(value, low / missed, high * missed)


def gain_without(evidence: Evidence, ms: float, *, quicker: float = _QUICKER) -> SpeedupInterval:
    """The gain when so many milliseconds of each batch are not spent: the other steps may become
    quicker, too.
    """
    # The upper bound counts steps that nothing interrupts: as they were timed, and at least by
    # `quicker` quicker.
    total, model = max(evidence.total_ms, 1e-9), max(evidence.model_ms, 1e-9)
    kept = 1 - _QUICKER if evidence.alone_ms is None else min(1.0, evidence.alone_ms / model)
    kept = min(kept, 1 - quicker)
    left = max(total - ms, 1e-3 * total)
    spared = (1 - kept) * min(left, model + evidence.ms.get("other", 0.0))
    low, high = total / left, total / max(left - spared, 1e-3 * total)
    return carried_over(math.sqrt(low * high), low, high)


def gain_of(evidence: Evidence, tried: Tried) -> SpeedupInterval:
    """The gain of the run in the way that was tried; what is not of the model costs what it did."""
    ms_of, rows = evidence.ms_of, evidence.rows_per_batch
    fed = ms_of("wait", "transfer") / rows
    own, around = ((*MODEL, "other"), ()) if tried.cause == "loop" else (MODEL, ("other",))
    changed = ms_of(*own) / rows + (fed if tried.cause == "data" else 0.0)
    each_batch = ms_of(*around, "callbacks") / tried.rows_per_batch
    # Logging comes with optimizer steps, checkpoints and validations with epochs.
    steps_change = rows * evidence.accumulate / (tried.rows_per_batch * tried.batches_per_step)
    kept = ms_of("logging") / rows * steps_change + ms_of("checkpoint", "validation") / rows
    kept += 0.0 if tried.cause == "data" else fed
    kept += 1000 * evidence.compile_s / (evidence.batches * rows) if tried.cause == "eager" else 0.0
    total = max(evidence.total_ms, 1e-9) / rows
    steps = tried.speedup
    bounds = (
        changed / max(times, 1e-9) + each_batch + kept
        for times in (steps.value, steps.low, steps.high)
    )
    return carried_over(*(total / max(left, 1e-9) for left in bounds))


def best_tried(evidence: Evidence, cause: str) -> tuple[Tried, SpeedupInterval] | None:
    """What was tried against a cause and gains most, where that is worth naming; of nearly equals
    the first.
    """
    gains = [(tried, gain_of(evidence, tried)) for tried in evidence.tried if tried.cause == cause]
    most = max((gain.value for _, gain in gains), default=0.0)
    return (
        next((each for each in gains if each[1].value >= 0.95 * most), None)
        if most >= LEAST_GAIN
        else None
    )


def by_trying(
    evidence: Evidence, cause: str, limit: str, also: str = "", *, changes_training: bool = False
) -> VerdictFinding | None:
    """The best that was tried against a cause; silent where it may be noise."""
    found = best_tried(evidence, cause)
    if found is None or found[1].value < (
        LEAST_GAIN if found[1].low > RECOMMENDED else LEAST_UNCERTAIN
    ):
        return None
    tried, gain = found
    why = f"tried here: {tried.rows_per_s:,.0f} rows/s of it against {tried.as_was:,.0f} as it was"
    why = f"{also}; {why}" if also else why
    share = 1 - 1 / gain.value
    fix = tried.override
    return VerdictFinding(
        cause, limit, share, why, override=fix, gain=gain, changes_training=changes_training
    )


def by_removing(
    evidence: Evidence,
    ms: float,
    cause: str,
    limit: str,
    why: str,
    *,
    quicker: float = _QUICKER,
    **more: Any,
) -> VerdictFinding | None:
    """A part that its fix takes away, where that is worth naming; `quicker`: see `gain_without`."""
    if ms <= 0 or evidence.total_ms < LEAST_GAIN * (evidence.total_ms - ms):
        return None
    gain = gain_without(evidence, ms, quicker=quicker)
    return VerdictFinding(cause, limit, ms / evidence.total_ms, why, gain=gain, **more)
