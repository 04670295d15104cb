"""One cause of lost time, in words and for `summary.json`.

A fix is recommended only where even the lower bound of its gain is worth it. Otherwise the cause stands without a
promise: a fix that slows a run is worse than none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flatout.perf.measure.intervals import Interval
from flatout.perf.verdict.evidence import LEAST_GAIN

RECOMMENDED = 1.05
"""What the lower bound of a gain must exceed."""
_PLAIN_GAIN, _PLAIN_SHARE = 1.25, 0.5
"""From where on a run that has just begun says so."""
_ONLY_SEEN = ("throttling", "shared", "memory", "cpu", "precision")
"""Causes that were seen for a share of the time, which is not what they cost: after all whose gain is known."""
_OTHER_TRAINING = ("batch", "communication")
"""Causes whose fix changes what is learned, so that it takes more to name them first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One cause of lost time."""

    cause: str
    limit: str
    """In words, as they stand after "limited by"."""
    share: float
    """Of the time, what it takes."""
    evidence: str
    override: str | None = None
    """What to type, where that removes the cause."""
    advice: str | None = None
    """What to do where no override does it."""
    gain: Interval | None = None
    """How many times as fast the run would be, where that was measured."""

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
        return self.gain.value if self.is_recommended and self.gain else 1 / max(1e-3, 1 - self.share)

    @property
    def weight(self) -> float:
        """What decides which cause comes first."""
        if self.cause == "cpu":  # cores that others take are not there, whatever else holds the run back
            return 1 / (1 - min(self.share, _PLAIN_SHARE))
        if self.gain is None and self.cause in _ONLY_SEEN:
            return LEAST_GAIN
        return math.sqrt(self.worth) if self.cause in _OTHER_TRAINING else self.worth

    @property
    def is_plain(self) -> bool:
        """Whether it costs so much that the run reports it at once: you can still end and fix it."""
        if self.gain is None and self.cause in _ONLY_SEEN:
            return self.share >= _PLAIN_SHARE
        return self.worth >= _PLAIN_GAIN
