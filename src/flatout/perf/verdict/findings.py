"""`VerdictFinding`, one cause of lost time with its fix, and the gain that the fix predicts.

A gain is an interval: how many times as fast the run would be. It comes from the parts of the time
that a fix removes, or from ways that were tried. Steps that are timed alone are not quite the steps
of a run. So the spread of the measurements is widened by the error of earlier predictions, which
`bench doctor` has measured. A fix is recommended only if even the lower bound is worth it.
Otherwise only the cause is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from flatout.perf.measure.intervals import SpeedupInterval
from flatout.perf.verdict.evidence import LEAST_GAIN, LEAST_UNCERTAIN, MODEL, Evidence, Tried

RECOMMENDED = 1.05  # a fix is recommended if the lower bound of its gain is above this
# A cause that costs so much is reported soon after training has started.
_PLAIN_GAIN = 1.25
_PLAIN_SHARE = 0.5
# Error of a prediction, in logarithms: a constant, and a fraction of the gain's logarithm.
_MISSED = 0.06
_MISSED_OF_GAIN = 0.1
# Steps that nothing interrupts may be faster by this fraction: threads stay awake.
_QUICKER = 0.25


@dataclass(frozen=True, slots=True)
class VerdictFinding:
    """One cause of lost time, and how to remove it."""

    cause: str
    limit: str  # the cause in words, after "limited by"
    share: float  # fraction of the time that it takes
    evidence: str
    _: KW_ONLY
    override: str | None = None  # removes the cause
    advice: str | None = None  # what to do if no override removes it
    # How many times as fast the run would be; None if that was not measured.
    gain: SpeedupInterval | None = None
    # Whether `share` is how often it was seen, not what it costs. Known gains come first.
    is_only_seen: bool = False
    # Whether the fix changes what is learned. Then it needs a larger gain to come first.
    changes_training: bool = False
    # Whether it comes after all others, as a choice for the reader; it is never the verdict.
    comes_last: bool = False
    # Whether others use the cores: those cores are missing whatever else limits the run.
    takes_cores: bool = False
    is_predicted: bool = False  # whether the gain was predicted, not measured

    @property
    def is_recommended(self) -> bool:
        """Whether the fix makes the run faster even at the lower bound of its gain."""
        return self.gain is not None and self.gain.low > RECOMMENDED

    @property
    def fix(self) -> str | None:
        """What to do: "data.workers=4", or "try data.workers=4" if the gain is uncertain."""
        if self.override is None:
            return self.advice
        if self.is_recommended:
            return self.override
        may_help = self.gain is None or self.gain.high > RECOMMENDED
        return f"try {self.override}" if may_help else None

    def in_words(self, say: Callable[[str], str]) -> VerdictFinding:
        """The same finding with its override and its advice rewritten by `say`."""
        return replace(
            self,
            override=self.override and say(self.override),
            advice=self.advice and say(self.advice),
        )

    def sentence(self) -> str:
        """The finding in one sentence, with its share, its fix and the evidence."""
        text = f"limited by {self.limit}: {self.share:.0%} of the time"
        if self.override and self.is_recommended:
            text += f"; {self.override} would make this run ≈ {self.gain} as fast"
        elif self.fix and self.is_recommended:
            text += f"; {self.fix}: the run would be ≈ {self.gain} as fast"
        elif self.fix and self.gain:
            how = "predicted" if self.is_predicted else "measured"
            text += f"; {self.fix}: {self.gain} {how}, too uncertain to promise"
        elif self.fix:
            text += f"; {self.fix}" + (" (untested)" if self.override else "")
        return f"{text} ({self.evidence})"

    def as_dict(self) -> dict[str, Any]:
        """The finding for `summary.json`; a gain that is too uncertain is None."""
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
        """Its gain; if that is unknown or uncertain, the gain if all of its share was saved."""
        if self.is_recommended and self.gain:
            return self.gain.value
        return 1 / max(1e-3, 1 - self.share)

    @property
    def weight(self) -> float:
        """The number by which findings are ordered; the largest comes first."""
        if self.takes_cores:
            return 1 / (1 - min(self.share, _PLAIN_SHARE))
        if self.gain is None and self.is_only_seen:
            return LEAST_GAIN
        return math.sqrt(self.worth) if self.changes_training else self.worth

    @property
    def is_plain(self) -> bool:
        """Whether it costs so much that the run reports it early: you can still stop and fix it."""
        if self.gain is None and self.is_only_seen:
            return self.share >= _PLAIN_SHARE
        return self.worth >= _PLAIN_GAIN


def carried_over(value: float, low: float, high: float) -> SpeedupInterval:
    """Widen the bounds by the error of predictions: the gain of steps becomes that of a run."""
    missed = math.exp(_MISSED + _MISSED_OF_GAIN * abs(math.log(value)))
    return SpeedupInterval(value, low / missed, high * missed)


def waiting_for_reads(
    share: float,
    evidence: str,
    *,
    override: str | None = None,
    advice: str | None = None,
    is_predicted: bool = False,
) -> VerdictFinding:
    """The finding that the host waits for numbers of the device, a `share` of the time."""
    # The host may need some of that time itself: the lower bound is no gain.
    most = 1 / max(1 - share, 1e-3)
    return VerdictFinding(
        "reads",
        "waiting for numbers of the device",
        share,
        evidence,
        override=override,
        advice=advice,
        gain=carried_over(most, 1.0, most),
        is_predicted=is_predicted,
    )


def gain_without(evidence: Evidence, ms: float, *, quicker: float = _QUICKER) -> SpeedupInterval:
    """The gain if `ms` milliseconds of each batch are saved.

    The rest of a step may become faster, too, as nothing interrupts it. The upper bound assumes so:
    by the times of such steps if they were tried, else by a quarter, and at least by the fraction
    `quicker`. A batch of 10 ms without 2 ms takes 8 ms: low is 10 / 8. If its 6 ms of the model
    become 4.5, high is 10 / 6.5.
    """
    total = max(evidence.total_ms, 1e-9)
    model = max(evidence.model_ms, 1e-9)
    timed = 1 - _QUICKER if evidence.alone_ms is None else evidence.alone_ms / model
    remaining = min(timed, 1 - quicker)
    left = max(total - ms, 1e-3 * total)
    spared = (1 - remaining) * min(left, model + evidence.ms.get("other", 0.0))
    low = total / left
    high = total / max(left - spared, 1e-3 * total)
    return carried_over(math.sqrt(low * high), low, high)


def gain_of(evidence: Evidence, tried: Tried) -> SpeedupInterval:
    """The gain of the whole run if it trains in the way that was tried.

    All times are milliseconds of a row. Only the time of the parts that the way changes (`changed`)
    is divided by the measured speedup; the rest stays, or scales with the number of batches. How
    much of reading belongs to rows and how much to batches is unknown: the lower bound takes all of
    it for rows, the upper one for batches.
    """
    ms_of = evidence.ms_of
    rows = evidence.rows_per_batch
    changed = ms_of(*MODEL) / rows
    each_batch = ms_of("callbacks") / tried.rows_per_batch
    if tried.cause == "loop":
        changed += ms_of("other") / rows
    else:
        each_batch += ms_of("other") / tried.rows_per_batch
    # Logging comes with optimizer steps, checkpoints and validations with epochs.
    steps_change = rows * evidence.accumulate / (tried.rows_per_batch * tried.batches_per_step)
    same = ms_of("logging") / rows * steps_change + ms_of("checkpoint", "validation") / rows
    feed = ms_of("wait", "transfer") / rows
    least_feed = feed * min(1.0, rows / tried.rows_per_batch)
    if tried.cause == "data":
        changed += feed
        feed = 0.0
        least_feed = 0.0
    if tried.cause == "eager":
        same += 1000 * evidence.compile_s / (evidence.batches * rows)
    total = max(evidence.total_ms, 1e-9) / rows

    def gain(times: float, feed_left: float) -> float:
        left = changed / max(times, 1e-9) + each_batch + same + feed_left
        return total / max(left, 1e-9)

    speedup = tried.speedup
    value = math.sqrt(gain(speedup.value, feed) * gain(speedup.value, least_feed))
    return carried_over(value, gain(speedup.low, feed), gain(speedup.high, least_feed))


def best_tried(evidence: Evidence, cause: str) -> tuple[Tried, SpeedupInterval] | None:
    """The way that was tried against a cause and gains most, and its gain.

    None if the gain is not worth naming. Of ways within 5 % of the best, the first one.
    """
    gains = [(tried, gain_of(evidence, tried)) for tried in evidence.tried if tried.cause == cause]
    most = max((gain.value for _, gain in gains), default=0.0)
    if most < LEAST_GAIN:
        return None
    return next((tried, gain) for tried, gain in gains if gain.value >= 0.95 * most)


def by_trying(
    evidence: Evidence, cause: str, limit: str, also: str = "", *, changes_training: bool = False
) -> VerdictFinding | None:
    """A finding by the best way that was tried against a cause; None if that may be noise.

    `also`: what the evidence says first.
    """
    best = best_tried(evidence, cause)
    if best is None:
        return None
    tried, gain = best
    if gain.value < (LEAST_GAIN if gain.low > RECOMMENDED else LEAST_UNCERTAIN):
        return None
    why = f"tried here: {tried.rows_per_s:,.0f} rows/s of it against {tried.as_was:,.0f} as it was"
    why = f"{also}; {why}" if also else why
    share = 1 - 1 / gain.value
    fix = tried.override
    return VerdictFinding(
        cause, limit, share, why, override=fix, gain=gain, changes_training=changes_training
    )


def by_removing(
    evidence: Evidence, ms: float, cause: str, limit: str, why: str, **more: Any
) -> VerdictFinding | None:
    """A finding whose fix saves `ms` of each batch; None if that is not worth naming.

    `more`: further fields of the finding; without `gain` among them it is `gain_without`.
    """
    if ms <= 0 or evidence.total_ms < LEAST_GAIN * (evidence.total_ms - ms):
        return None
    more = {"gain": gain_without(evidence, ms)} | more
    return VerdictFinding(cause, limit, ms / evidence.total_ms, why, **more)
