"""How many rows at once: sizes to try, what memory they will take, and where more of them stop to pay."""

from __future__ import annotations

from collections.abc import Sequence

_MOST = 1 << 14
_GUESSES = ((12, 16), (16, 32), (24, 48), (40, 64), (80, 128))
"""Memory of a card in GB, and rows of 128 tokens that a BERT of 110 M weights trains on it: old guides' rule."""
_GUESSED_WEIGHTS, _GUESSED_TOKENS = 110e6, 128


def first_guess(memory_bytes: float, weights: int, longest: int) -> int:
    """Rows to begin with where they may grow: the guides' table, for this model and these rows; a power of two."""
    rows = max([rows for gigabytes, rows in _GUESSES if memory_bytes >= 0.9e9 * gigabytes], default=8)
    rows = int(rows * min(64.0, _GUESSED_WEIGHTS / max(weights, 1)) * _GUESSED_TOKENS / max(longest, 1))
    return min(1024, max(8, 1 << max(0, rows.bit_length() - 1)))


def divisors(share: int) -> list[int]:
    """Sizes into which `share` rows can be divided evenly, each about half of the one before; smallest first."""
    found = [share]
    while found[-1] > 1:
        below = next(rows for rows in range(found[-1] // 2, 0, -1) if share % rows == 0)
        found.append(below)
    return found[::-1]


def doublings(first: int, most: int) -> list[int]:
    """Sizes that double from a first one."""
    found = []
    while first <= min(most, _MOST):
        found.append(first)
        first *= 2
    return found


def predicted_bytes(seen: Sequence[tuple[int, int]], rows: int, *, base: int, fixed: int) -> int:
    """Memory that so many rows will take, from sizes that were tried (rows, bytes) in one arithmetic.

    Of one size the growth a row is what it took beyond the model (`base`) and what each weight brings (`fixed`: its
    gradient and the optimizer's means); of two or more it is the growth between the largest two.
    """
    points = sorted(dict(seen).items())
    last_rows, last = points[-1]
    if len(points) > 1:
        before_rows, before = points[-2]
        growth = (last - before) / (last_rows - before_rows)
    else:
        growth = (last - base - fixed) / last_rows
    return int(last + max(0.0, growth) * (rows - last_rows))


def knee(rates: Sequence[tuple[int, float]], gain: float) -> int:
    """The size after which twice as many rows bring less than `gain` more speed, of sizes from small to large."""
    best_rows, best = rates[0]
    for rows, rate in rates[1:]:
        if rate < best * (1 + gain):
            break
        best_rows, best = rows, rate
    return best_rows
