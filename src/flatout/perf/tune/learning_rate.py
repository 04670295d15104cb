"""The learning-rate range test: a rate that rises a little each step, until the loss does too.

After Smith (2017, "Cyclical learning rates for training neural networks"). What is suggested is a rate at which the
smoothed loss falls fastest, not one at which it is lowest: there it is about to rise. A short test sees the first steps
only; for an encoder that is fine-tuned over hours, what its authors recommend is worth more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

STEPS = 80
LEAST, MOST = 1e-6, 1.0
_MEMORY = 0.9
LEAST_STEPS = 12


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A learning rate, and the smoothed losses it was read off."""

    rate: float
    why: str
    evidence: str


def smoothed(losses: Sequence[float]) -> list[float]:
    """A running mean that forgets, corrected for its beginning."""
    mean, found = 0.0, []
    for number, loss in enumerate(losses, 1):
        mean = _MEMORY * mean + (1 - _MEMORY) * loss
        found.append(mean / (1 - _MEMORY**number))
    return found


def suggested(rates: Sequence[float], losses: Sequence[float]) -> Suggestion | None:
    """The rate at which the smoothed loss falls fastest; None where it does not fall."""
    kept = [(rate, loss) for rate, loss in zip(rates, losses, strict=True) if math.isfinite(loss)]
    if len(kept) < LEAST_STEPS:
        return None
    rates, seen = [rate for rate, _ in kept], smoothed([loss for _, loss in kept])
    lowest = min(range(len(seen)), key=lambda place: seen[place])
    reach = 3
    falls = {place: seen[place + reach] - seen[place - reach] for place in range(reach, min(lowest, len(seen) - reach))}
    if not falls or seen[lowest] > 0.98 * seen[0]:
        return None
    steepest = min(falls, key=lambda place: falls[place])
    rate = float(f"{rates[steepest]:.1e}")
    first, least = f"{seen[0]:.3f} at {rates[0]:.0e}", f"{seen[lowest]:.3f} at {rates[lowest]:.1e}"
    evidence = f"smoothed loss {first}, {seen[steepest]:.3f} here, lowest {least}; {len(rates)} steps"
    return Suggestion(rate, "the loss falls fastest there", evidence)
