"""Rules of tuning: rows at once to try, the memory they will take, and a learning rate.

All functions are pure. The learning rate comes from a range test (Smith 2017, "Cyclical learning
rates for training neural networks"): steps whose rate rises until the loss rises, too. The
suggested rate is the one at which the smoothed loss falls fastest. Where it is lowest it is about
to rise. A short test sees the first steps only; for an encoder the rate of its authors is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_DOUBLED_ROWS = 1 << 14  # doublings end here; the divisors of a set size may be larger
RANGE_STEPS = 80  # of a range test, at most
LEAST_STEPS = 12  # of a range test; fewer give no rate
LEAST_RATE = 1e-6
MOST_RATE = 1.0
_MEMORY = 0.9  # weight of the mean so far in a smoothed loss
_REACH = 3  # steps before and after, over which the fall of the loss is measured
# Memory of a card in GB, and rows of 128 tokens that a BERT of 110 M weights trains on it: a rule
# of old guides.
_GUESSES = ((12, 16), (16, 32), (24, 48), (40, 64), (80, 128))
_GUESSED_WEIGHTS = 110e6
_GUESSED_TOKENS = 128


def first_guess(memory_bytes: float, weights: int, longest: int) -> int:
    """Rows at once to try first, a power of two from 8 to 1024.

    The guides' table, scaled to this model and its longest row. A card of 24 GB takes 48 rows of
    128 tokens of BERT; for rows of 256 tokens that is 24, and so 16.
    """
    rows = 8
    for gigabytes, rows_of_card in _GUESSES:
        if memory_bytes >= 0.9e9 * gigabytes:
            rows = rows_of_card
    by_weights = min(64.0, _GUESSED_WEIGHTS / max(weights, 1))
    rows = int(rows * by_weights * _GUESSED_TOKENS / max(longest, 1))
    return min(1024, max(8, 1 << max(0, rows.bit_length() - 1)))


def divisors(rows: int) -> list[int]:
    """Divisors of `rows`, each at most half of the next: 12 gives [1, 3, 6, 12]."""
    sizes = [rows]
    while sizes[-1] > 1:
        halved = range(sizes[-1] // 2, 0, -1)
        sizes.append(next(size for size in halved if rows % size == 0))
    return sizes[::-1]


def doublings(first: int, most: int) -> list[int]:
    """`first`, twice as many, and so on up to `most`; `first` is 1 or more."""
    sizes = []
    while first <= min(most, MOST_DOUBLED_ROWS):
        sizes.append(first)
        first *= 2
    return sizes


def predicted_bytes(seen: Sequence[tuple[int, int]], rows: int, *, base: int, fixed: int) -> int:
    """Memory that `rows` at once will take, by a line through the two largest sizes in `seen`.

    `seen`: rows and bytes of sizes that were measured in one precision. With a single size, the
    line starts at 0 rows with `base + fixed` bytes: the model, and for each weight its gradient and
    the optimizer's means. Example: 8 rows with 3 GB and 16 with 5 GB give 9 GB for 32 rows.
    """
    points = [(0, base + fixed), *sorted(dict(seen).items())]
    (fewer_rows, fewer_bytes), (most_rows, most_bytes) = points[-2:]
    bytes_a_row = max(0.0, (most_bytes - fewer_bytes) / (most_rows - fewer_rows))
    return int(most_bytes + bytes_a_row * (rows - most_rows))


def smoothed(losses: Sequence[float]) -> list[float]:
    """An exponential running mean, corrected for its start at 0 as in Adam."""
    mean = 0.0
    means = []
    for number, loss in enumerate(losses, 1):
        mean = _MEMORY * mean + (1 - _MEMORY) * loss
        means.append(mean / (1 - _MEMORY**number))
    return means


def suggested(rates: Sequence[float], losses: Sequence[float]) -> tuple[float, str] | None:
    """The rate at which the smoothed loss falls fastest, and the losses as text.

    None if the loss does not fall by 2 %, or fewer than `LEAST_STEPS` losses are finite.
    """
    finite = [(rate, loss) for rate, loss in zip(rates, losses, strict=True) if math.isfinite(loss)]
    if len(finite) < LEAST_STEPS:
        return None
    rates = [rate for rate, _ in finite]
    means = smoothed([loss for _, loss in finite])
    lowest = means.index(min(means))
    steps = range(_REACH, min(lowest, len(means) - _REACH))
    if not steps or means[lowest] > 0.98 * means[0]:
        return None
    steepest = min(steps, key=lambda step: means[step + _REACH] - means[step - _REACH])
    first = f"{means[0]:.3f} at {rates[0]:.0e}"
    least = f"{means[lowest]:.3f} at {rates[lowest]:.1e}"
    losses_as_text = f"smoothed loss {first}, {means[steepest]:.3f} here, lowest {least}"
    return float(f"{rates[steepest]:.1e}"), f"{losses_as_text}; {len(rates)} steps"
