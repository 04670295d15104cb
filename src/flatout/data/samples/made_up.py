"""What built-in samples are made of: words from syllables, and numbers by a long-tailed frequency
law.

All work is by the block: drawing a number is a look into a table, so millions a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flatout.errors import check_settings

_BUCKETS = 2**17
# of made-up words: onsets and vowels of each syllable, and ends of words
Pieces = dict[str, list[str]]


@dataclass(kw_only=True, slots=True)
class SampleConfig:
    """Settings of a built-in sample, held to their ranges."""

    def __post_init__(self) -> None:
        check_settings(self, "data.sample")


def disturb(
    random: np.random.Generator, values: NDArray[np.int64], num_values: int, noise: float
) -> NDArray[np.int64]:
    """The values with `noise` of them replaced by any other value."""
    changed = random.random(len(values)) < noise
    return np.where(
        changed, (values + random.integers(1, num_values, len(values))) % num_values, values
    )


def made_up_words(
    random: np.random.Generator, count: int, taken: set[str], syllables: Pieces
) -> list[str]:
    """Words of two or three syllables, none of them in `taken`, which they join."""
    made: list[str] = []
    while len(made) < count:
        tries = 2 * count + 16
        words = np.char.add(_drawn(random, tries, syllables), _drawn(random, tries, syllables))
        words = np.where(
            random.random(len(words)) < 0.3,
            np.char.add(words, _drawn(random, tries, syllables)),
            words,
        )
        words = np.char.add(words, _any_of(random, syllables["ends"], len(words)))
        fresh = [word for word in dict.fromkeys(words.tolist()) if word not in taken][
            : count - len(made)
        ]
        taken.update(fresh)
        made += fresh
    return made


def _drawn(random: np.random.Generator, count: int, syllables: Pieces) -> NDArray[np.str_]:
    return np.char.add(*(_any_of(random, syllables[name], count) for name in ("onsets", "vowels")))


def _any_of(random: np.random.Generator, pieces: list[str], count: int) -> NDArray[np.str_]:
    return np.array(pieces)[random.integers(0, len(pieces), count)]


def draw_long_tailed(
    random: np.random.Generator, count: int, size: int, exponent: float
) -> NDArray[np.int32]:
    """Numbers below `size`, the first ones commonest, by a power law."""
    shares, guide = _power_law(size, exponent)
    chances = random.random(count)
    drawn = guide[(chances * _BUCKETS).astype(np.int32)]
    unsure = np.flatnonzero(drawn < 0)
    drawn[unsure] = np.searchsorted(shares, chances[unsure])
    return np.minimum(drawn, size - 1, out=drawn)


@lru_cache
def _power_law(size: int, exponent: float) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Summed shares of the numbers below `size`, and the number each bucket of chances means; -1
    where several.
    """
    shares = np.cumsum(long_tail(size, exponent))
    # a power of two: no rounding
    edges = np.searchsorted(shares, np.arange(_BUCKETS + 1) / _BUCKETS)
    return shares, np.where(edges[:-1] == edges[1:], edges[:-1], -1).astype(np.int32)


@lru_cache
def long_tail(size: int, exponent: float) -> NDArray[np.float64]:
    shares = 1.0 / np.arange(2, size + 2) ** exponent
    return shares / shares.sum()
