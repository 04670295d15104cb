"""Make words from syllables, and draw numbers by a long-tailed law, for the built-in samples.

All work is by the block. A number is drawn by a look into a table, so millions a second. The same
random stream gives the same words and numbers on every machine. Open this file to change how words
sound or how common the first ones are; every stored sample changes with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_BUCKETS = 2**17  # equal parts of the chances from 0 to 1; a power of two, so without rounding
_SEVERAL = -1  # a bucket in which chances mean different numbers
_THIRD_SYLLABLE_SHARE = 0.3  # of made-up words
# of made-up words: onsets and vowels of each syllable, and ends of words
Pieces = dict[str, list[str]]


def disturb(
    random: np.random.Generator, values: NDArray[np.int64], num_values: int, noise: float
) -> NDArray[np.int64]:
    """Replace a fraction `noise` of the values by any other value below `num_values`."""
    is_changed = random.random(len(values)) < noise
    others = (values + random.integers(1, num_values, len(values))) % num_values
    return np.where(is_changed, others, values)


class WordMaker:
    """Makes up words of two or three syllables, none of them twice and none of the known ones.

    With the onsets b and k, the vowels a and o, and the ends "" and "n": ba-ko, ko-ba-ka-n, …
    """

    def __init__(
        self, random: np.random.Generator, taken_words: Iterable[str], syllables: Pieces
    ) -> None:
        self.random = random
        self._taken = set(taken_words)
        self._syllables = syllables

    def make_words(self, count: int) -> list[str]:
        made: list[str] = []
        while len(made) < count:
            # Many tries repeat a word, so more are drawn than are wanted, all of them at once.
            tries = 2 * count + 16
            first = self._draw_syllables(tries)
            second = self._draw_syllables(tries)
            two = np.char.add(first, second)
            has_third = self.random.random(tries) < _THIRD_SYLLABLE_SHARE
            three = np.char.add(two, self._draw_syllables(tries))
            stems = np.where(has_third, three, two)
            words = np.char.add(stems, self._draw_pieces("ends", tries))
            new_words = [word for word in dict.fromkeys(words.tolist()) if word not in self._taken]
            new_words = new_words[: count - len(made)]
            self._taken.update(new_words)
            made += new_words
        return made

    def _draw_syllables(self, count: int) -> NDArray[np.str_]:
        onsets = self._draw_pieces("onsets", count)
        vowels = self._draw_pieces("vowels", count)
        return np.char.add(onsets, vowels)

    def _draw_pieces(self, kind: str, count: int) -> NDArray[np.str_]:
        pieces = self._syllables[kind]
        return np.array(pieces)[self.random.integers(0, len(pieces), count)]


def draw_long_tailed(
    random: np.random.Generator, count: int, size: int, exponent: float
) -> NDArray[np.int32]:
    """Draw `count` numbers below `size`; the first ones are the commonest, by a power law."""
    # Most buckets mean one number, so most draws are a look into a table. Only the few draws in a
    # bucket where two numbers meet need a search.
    cumulated, number_of_bucket = _power_law(size, exponent)
    chances = random.random(count)
    drawn = number_of_bucket[(chances * _BUCKETS).astype(np.int32)]
    unsure = np.flatnonzero(drawn == _SEVERAL)
    drawn[unsure] = np.searchsorted(cumulated, chances[unsure])
    # The last sum may be a rounding below 1.
    return np.minimum(drawn, size - 1, out=drawn)


@lru_cache
def _power_law(size: int, exponent: float) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Cumulated shares of the numbers below `size`, and the number of each bucket of chances.

    With shares 0.6 and 0.4 and four buckets, the numbers are [0, 0, several, 1]: a chance from 0.5
    to 0.75 may be either.
    """
    cumulated = np.cumsum(long_tail(size, exponent))
    edges = np.searchsorted(cumulated, np.arange(_BUCKETS + 1) / _BUCKETS)
    lower = edges[:-1]
    number_of_bucket = np.where(lower == edges[1:], lower, _SEVERAL)
    return cumulated, number_of_bucket.astype(np.int32)


@lru_cache
def long_tail(size: int, exponent: float) -> NDArray[np.float64]:
    """Shares of `size` numbers by a power law; they fall and add up to 1."""
    shares = 1.0 / np.arange(2, size + 2) ** exponent
    return shares / shares.sum()
