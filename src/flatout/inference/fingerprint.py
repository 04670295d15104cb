"""How unlike texts are to those that a model was trained on.

A fingerprint of the training texts counts pairs of neighbouring tokens, by hash. Of each text it
then measures how rare its pairs are, how many words are unknown, and its length. A text is unlike
where one of these is beyond 98.75 % of the held-out texts of the training. About one in twenty of
the same source is. Where many more are, the file is from elsewhere.

It reads at most 50,000 rows of the store, where they are tokenised already, and takes 130 kB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from flatout.data.batches.gather import TOKENS
from flatout.data.ragged import row_begins, row_indices
from flatout.data.store.store import StoreSplit
from flatout.tasks.abstention import Array, KeptArrays, are_numbers

_BUCKETS = 1 << 16
_FACTOR = 40_503  # odd, so that pairs with one word in common differ
_MOST_ROWS = 50_000
_USUAL = 0.05  # share of unlike rows in a file of the same source
_TAIL = _USUAL / 4  # of them, by each of four measures
_ROWS_OF_END = 250
_LEAST_ROWS = 20  # of a file that is judged
_NAMED = 5  # rows that are most unlike


@dataclass(frozen=True, slots=True)
class Fingerprint(KeptArrays):
    """What training texts look like."""

    FILE = "fingerprint.npz"
    surprise: Array  # [65536] minus the logarithm of the share of pairs of tokens, by their hash
    unknown: int  # the id of unknown words
    quantiles: Array  # [2, 4] of the measures of held-out rows

    def fit(self) -> bool:
        arrays = tuple(map(np.asarray, (self.surprise, self.unknown, self.quantiles)))
        shapes = [array.shape for array in arrays]
        return shapes == [(_BUCKETS,), (), (2, 4)] and are_numbers(*arrays)

    @classmethod
    def of(cls, train: StoreSplit, held_out: StoreSplit, unknown: int) -> Fingerprint:
        counts = np.bincount(_hash_pairs(*_sample_rows(train)), minlength=_BUCKETS) + 0.5
        plain = cls(-np.log(counts / counts.sum()).astype(np.float16), unknown, counts[:0])
        measures = plain.measure(*_sample_rows(held_out))
        # the ends of fewer rows stray by chance, so they are taken further out
        end = 1 - _TAIL * min(1, len(measures) / _ROWS_OF_END)
        return replace(plain, quantiles=np.quantile(measures, [0.5, end], axis=0))

    def measure(self, tokens: Array, lengths: Array) -> Array:
        """`[R, 4]`: mean surprise, share of unknown words, and the length, to both sides."""
        of_tokens = np.stack([self.surprise[_hash_pairs(tokens, lengths)], tokens == self.unknown])
        means = np.add.reduceat(of_tokens, row_begins(lengths), axis=1, dtype=np.float64) / lengths
        return np.stack([*means, np.log(lengths), -np.log(lengths)], axis=1)

    def compare(self, tokens: Array, lengths: Array) -> Array:
        """`[R]` how unlike rows are: 0 in the middle of the held-out rows, unlike above 1."""
        middle, end = self.quantiles
        apart = (self.measure(tokens, lengths) - middle) / (end - middle + 1e-3)
        return apart.max(axis=1).astype(np.float16)


def describe_drift(unlike: Array) -> str:
    """A line about a file whose rows are unlike; empty for one of the same source."""
    share = (unlike > 1).mean()
    # few rows stray by chance
    most = _USUAL + max(_USUAL, 3 * math.sqrt(_USUAL / len(unlike)))
    if share <= most or len(unlike) < _LEAST_ROWS:
        return ""
    rows = ", ".join(map(str, np.argsort(-unlike, kind="stable")[:_NAMED] + 1))
    return (
        f"{share:.0%} of the rows are unlike the training texts (usual: up to {most:.0%}); most"
        f" unlike: rows {rows}"
    )


def _sample_rows(split: StoreSplit) -> tuple[Array, Array]:
    """Tokens and lengths of every row, or of every n-th of very many."""
    rows = split.ragged(TOKENS)
    chosen = slice(0, split.num_rows, 1 + split.num_rows // _MOST_ROWS)
    lengths = rows.lengths[chosen]
    return rows.values[row_indices(rows.offsets[chosen], lengths)], lengths


def _hash_pairs(tokens: Array, lengths: Array) -> Array:
    """For each token the bucket of it and the one before; the first of a row has none before."""
    before = np.roll(tokens, 1).astype(np.int64)
    before[row_begins(lengths)] = 0
    return (before * _FACTOR + tokens) % _BUCKETS
