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

_BUCKETS = 1 << 16  # of the hashes of pairs
_FACTOR = 40_503  # odd, so that pairs with one word in common differ
_MOST_ROWS = 50_000  # that a fingerprint is made of
_USUAL = 0.05  # share of unlike rows in a file of the same source
_TAIL = _USUAL / 4  # of them, by each of four measures
_ROWS_OF_END = 250  # held-out rows, of which so few are in the tail that the end is well known
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
        # Half a pair more in each bucket: one that no training text has is rare, not impossible.
        counts = np.bincount(_hash_pairs(*_sample_rows(train)), minlength=_BUCKETS) + 0.5
        surprise = -np.log(counts / counts.sum())
        without_quantiles = cls(surprise.astype(np.float16), unknown, np.empty(0))
        measures = without_quantiles.measure(*_sample_rows(held_out))
        # The ends of few rows stray by chance, so they are taken further out: of 250 rows and more
        # at 98.75 %, of 125 rows at 99.4 %.
        end = 1 - _TAIL * min(1, len(measures) / _ROWS_OF_END)
        return replace(without_quantiles, quantiles=np.quantile(measures, [0.5, end], axis=0))

    def measure(self, tokens: Array, lengths: Array) -> Array:
        """`[R, 4]`: mean surprise, share of unknown words, and the length, to both sides."""
        surprise = self.surprise[_hash_pairs(tokens, lengths)]
        of_tokens = np.stack([surprise, tokens == self.unknown])
        sums = np.add.reduceat(of_tokens, row_begins(lengths), axis=1, dtype=np.float64)
        mean_surprise, unknown_share = sums / lengths
        size = np.log(lengths)
        return np.stack([mean_surprise, unknown_share, size, -size], axis=1)

    def compare(self, tokens: Array, lengths: Array) -> Array:
        """`[R]` how unlike rows are: 0 in the middle of the held-out rows, unlike above 1."""
        middle, end = self.quantiles
        distance = self.measure(tokens, lengths) - middle
        in_usual_distances = distance / (end - middle + 1e-3)
        return in_usual_distances.max(axis=1).astype(np.float16)


def describe_drift(unlike: Array) -> str:
    """A line about a file whose rows are unlike; empty for one of the same source."""
    share = (unlike > 1).mean()
    # Twice the usual share passes, and more of few rows: these stray by chance.
    most = _USUAL + max(_USUAL, 3 * math.sqrt(_USUAL / len(unlike)))
    if share <= most or len(unlike) < _LEAST_ROWS:
        return ""
    most_unlike = np.argsort(-unlike, kind="stable")[:_NAMED]
    rows = ", ".join(map(str, most_unlike + 1))
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
