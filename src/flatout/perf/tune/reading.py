"""What is read off measurements: which rows at once to try, what memory they will take, and a
learning rate.

Rows: sizes to try, and the memory that more of them will take. The rate: after Smith (2017,
"Cyclical learning rates for training neural networks"), of steps whose rate rises until the loss
does too. What is suggested is a rate at which the smoothed loss falls fastest, not one at which it
is lowest: there it is about to rise. A short test sees the first steps only; for an encoder its
authors' rate is worth more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_MOST = 1 << 14
# of a range test: at most, and fewer of which tell nothing
RANGE_STEPS = 80
LEAST_STEPS = 12
LEAST_RATE = 1e-6
MOST_RATE = 1.0
_MEMORY = 0.9  # share of the mean so far in a smoothed loss
_GUESSES = ((12, 16), (16, 32), (24, 48), (40, 64), (80, 128))
"""Memory of a card in GB, and rows of 128 tokens that a BERT of 110 M weights trains on it: old
guides' rule."""
_GUESSED_WEIGHTS = 110e6
_GUESSED_TOKENS = 128


def first_guess(memory_bytes: float, weights: int, longest: int) -> int:
    """Rows to begin with where they may grow: the guides' table, for this model and these rows; a
    power of two.
    """
    rows = max(
        [rows for gigabytes, rows in _GUESSES if memory_bytes >= 0.9e9 * gigabytes], default=8
    )
    rows = int(
        rows * min(64.0, _GUESSED_WEIGHTS / max(weights, 1)) * _GUESSED_TOKENS / max(longest, 1)
    )
    return min(1024, max(8, 1 << max(0, rows.bit_length() - 1)))


def divisors(share: int) -> list[int]:
    """Sizes into which `share` rows can be divided evenly, each about half of the one before;
    smallest first.
    """
    found = [share]
    while found[-1] > 1:
        found.append(next(rows for rows in range(found[-1] // 2, 0, -1) if share % rows == 0))
    return found[::-1]


def doublings(first: int, most: int) -> list[int]:
    return [
        size
        for size in (first << times for times in range(_MOST.bit_length()))
        if size <= min(most, _MOST)
    ]


def predicted_bytes(seen: Sequence[tuple[int, int]], rows: int, *, base: int, fixed: int) -> int:
    """Memory that so many rows will take, from sizes that were tried (rows, bytes) in one
    arithmetic.
    """
    # Of one size the growth a row is what it took beyond the model (`base`) and what each weight
    # brings (`fixed`: its gradient and the optimizer's means); of two or more it is the growth
    # between the largest two.
    (before_rows, before), (last_rows, last) = [(0, base + fixed), *sorted(dict(seen).items())][-2:]
    return int(last + max(0.0, (last - before) / (last_rows - before_rows)) * (rows - last_rows))


def smoothed(losses: Sequence[float]) -> list[float]:
    """A running mean that forgets, corrected for its beginning."""
    mean = 0.0
    found = []
    for number, loss in enumerate(losses, 1):
        mean = _MEMORY * mean + (1 - _MEMORY) * loss
        found.append(mean / (1 - _MEMORY**number))
    return found


def suggested(rates: Sequence[float], losses: Sequence[float]) -> tuple[float, str] | None:
    """The rate at which the smoothed loss falls fastest, and the losses it is read off; None where
    it does not fall.
    """
    kept = [(rate, loss) for rate, loss in zip(rates, losses, strict=True) if math.isfinite(loss)]
    if len(kept) < LEAST_STEPS:
        return None
    rates = [rate for rate, _ in kept]
    seen = smoothed([loss for _, loss in kept])
    lowest = seen.index(min(seen))
    reach = 3
    falls = {
        place: seen[place + reach] - seen[place - reach]
        for place in range(reach, min(lowest, len(seen) - reach))
    }
    if not falls or seen[lowest] > 0.98 * seen[0]:
        return None
    steepest = min(falls, key=lambda place: falls[place])
    first, least = f"{seen[0]:.3f} at {rates[0]:.0e}", f"{seen[lowest]:.3f} at {rates[lowest]:.1e}"
    evidence = (
        f"smoothed loss {first}, {seen[steepest]:.3f} here, lowest {least}; {len(rates)} steps"
    )
    return float(f"{rates[steepest]:.1e}"), evidence
