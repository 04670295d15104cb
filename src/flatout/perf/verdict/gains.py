"""How many times as fast a run would be: from parts that a fix removes, or from ways that were tried.

Each gain is an interval. Its inner part is the spread of what was measured. Around that lies what earlier predictions
missed by when they were confirmed (`bench doctor`): steps timed apart are not quite the steps of a run.
"""

from __future__ import annotations

import math

from flatout.perf.measure.intervals import Interval
from flatout.perf.verdict.evidence import LEAST_GAIN, MODEL, Evidence, Tried

_MISSED, _MISSED_OF_GAIN = 0.06, 0.1
"""By how much a prediction may miss, in logarithms: at least, and for each unit of the gain's own logarithm."""
_QUICKER = 0.25
"""By how much steps that nothing interrupts may be quicker than steps between callbacks: threads stay awake."""


def carried_over(gain: Interval) -> Interval:
    """A gain of steps as the gain of a run: the bounds with what predictions miss by."""
    return gain.widened(math.exp(_MISSED + _MISSED_OF_GAIN * abs(math.log(gain.value))))


def gain_without(evidence: Evidence, ms: float, *, interrupts: bool = False) -> Interval:
    """The gain when so many milliseconds of each batch are not spent: the other steps may become quicker, too.

    The upper bound counts steps that nothing interrupts, as they were timed. `interrupts`: what goes stood between
    steps, and those are then up to a quarter quicker even where no try has shown it.
    """
    total, model = max(evidence.total_ms, 1e-9), max(evidence.model_ms, 1e-9)
    kept = 1 - _QUICKER if evidence.alone_ms is None else min(1.0, evidence.alone_ms / model)
    kept = min(kept, 1 - _QUICKER) if interrupts else kept
    left = max(total - ms, 1e-3 * total)
    quicker = (1 - kept) * min(left, model + evidence.ms.get("other", 0.0))
    low, high = total / left, total / max(left - quicker, 1e-3 * total)
    return carried_over(Interval(math.sqrt(low * high), low, high))


def gain_uncompiled(evidence: Evidence, ms: float) -> Interval:
    """The gain when nothing is compiled: by the compiler's own clock, `ms` of each batch, and by steps without it.

    That clock leaves out what torch does around a compilation, so it is the lower bound. The upper one leaves out what
    else stands between steps, too: garbage of the compiler is cleared away there.
    """
    clocked = gain_without(evidence, ms, interrupts=True)
    if evidence.eager_ms is None:
        return clocked
    total = max(evidence.total_ms, 1e-9)
    left = max(total - evidence.model_ms + evidence.eager_ms, 1e-3 * total)
    tried, most = total / left, total / max(left - evidence.ms.get("other", 0.0), 1e-3 * total)
    return carried_over(Interval(tried, min(tried, clocked.value), max(most, clocked.value)))


def gain_of(evidence: Evidence, tried: Tried) -> Interval:
    """The gain of the run in the way that was tried; what is not of the model costs what it did."""
    return carried_over(tried.speedup.mapped(lambda speedup: _gain_at(evidence, tried, speedup)))


def _gain_at(evidence: Evidence, tried: Tried, speedup: float) -> float:
    def each(*parts: str) -> float:
        return sum(evidence.ms.get(part, 0.0) for part in parts)

    rows = evidence.rows_per_batch
    fed = each("wait", "transfer") / rows
    changed = each(*MODEL) / rows + (fed if tried.cause == "data" else 0.0)
    each_batch = each("other", "callbacks") / tried.rows_per_batch
    # Logging comes with optimizer steps, checkpoints and validations with epochs.
    steps_change = rows * evidence.accumulate / (tried.rows_per_batch * tried.batches_per_step)
    kept = each("logging") / rows * steps_change + each("checkpoint", "validation") / rows
    kept += 0.0 if tried.cause == "data" else fed
    return max(evidence.total_ms, 1e-9) / rows / max(changed / max(speedup, 1e-9) + each_batch + kept, 1e-9)


def best_tried(evidence: Evidence, cause: str) -> tuple[Tried, Interval] | None:
    """What was tried against a cause and gains most, where that is worth naming; of nearly equals the first."""
    gains = [(tried, gain_of(evidence, tried)) for tried in evidence.tried if tried.cause == cause]
    most = max((gain.value for _, gain in gains), default=0.0)
    return next((each for each in gains if each[1].value >= 0.95 * most), None) if most >= LEAST_GAIN else None
