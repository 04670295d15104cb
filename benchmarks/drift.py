"""Whether `predict` names a file from elsewhere as unlike the training texts, and none of the same
source.

Files are 200 rows that are drawn from texts which the fingerprint has not seen: of the same set,
and of every other one. Sets of one kind of text (tweets) are not held against each other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks.abstention import LabelledSet, read_sets
from benchmarks.claim import Claim, Options, bounded, quiet, reaching
from flatout.data import TextData
from flatout.data.tokens.long_texts import CUT
from flatout.data.tokens.subwords import encode_texts
from flatout.inference.fingerprint import Fingerprint, describe_drift

_FILES = 20
_LEAST = 0.95  # of the files from elsewhere that are named, and of the others that are not
_ROWS = 200
_MOST_TEXTS = 6_000  # of a set, that files are drawn from


def claims(options: Options) -> Iterator[Claim]:
    sets = list(read_sets(options))
    with tempfile.TemporaryDirectory() as folder:
        for labelled in sets:
            compare = _fingerprint(labelled, Path(folder))
            yield from _name_files(compare, labelled, sets)


def _fingerprint(labelled: LabelledSet, cache: Path) -> Callable[[list[str]], NDArray[np.floating]]:
    """What compares texts with those of a set, tokenised as a run on it would."""
    data = TextData(train=labelled.trained, cache=str(cache))
    with quiet():
        data.prepare_data()
        data.setup("fit")
    vocabulary = data.info.vocabulary
    splits = data.store.splits
    fingerprint = Fingerprint.of(splits["train"], splits["validation"], vocabulary.unknown)

    def compare(texts: list[str]) -> NDArray[np.floating]:
        encoded = encode_texts(vocabulary, pa.array(texts), data.info.max_length, CUT)
        return fingerprint.compare(encoded.tokens, encoded.lengths)

    return compare


def _name_files(
    compare: Callable[[list[str]], NDArray[np.floating]],
    labelled: LabelledSet,
    sets: list[LabelledSet],
) -> Iterator[Claim]:
    title = f"{labelled.name}: files of its own source that are named"
    unlike = compare(labelled.aside)
    named = _count_named(unlike)
    note = f"{(unlike > 1).mean():.1%} of its rows are unlike"
    yield bounded(title, named, f"of {_FILES}", most=(1 - _LEAST) * _FILES, note=note)
    counts = {}
    for other in sets:
        if other.name.partition("_")[0] != labelled.name.partition("_")[0]:
            counts[other.name] = _count_named(compare(other.trained["text"][:_MOST_TEXTS]))
    title = f"{labelled.name}: files of another source that are named"
    files = _FILES * len(counts)
    note = ", ".join(f"{name} {count}" for name, count in counts.items())
    yield reaching(title, sum(counts.values()), f"of {files}", least=_LEAST * files, note=note)


def _count_named(unlike: NDArray[np.floating]) -> int:
    """How many files of some of the rows are named."""
    random = np.random.default_rng(0)
    files = (random.permutation(unlike)[:_ROWS] for _ in range(_FILES))
    return sum(bool(describe_drift(rows)) for rows in files)
