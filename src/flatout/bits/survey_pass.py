"""The first pass over records of people: what the second needs to know before it writes.

    in    records of all splits
    out   of the training rows: counts of 2-grams, the grams of the raw texts, and the numbers of
          a two-step hash that a model has an input for; of all: ids that name several records

Open this file to change what is counted or refused before records are encoded.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from flatout.bits.grams import LABEL_INDEX, LABELS, GramIndex, pad_with_blanks, strip_punctuation
from flatout.bits.source import BitSource, RepeatedIds
from flatout.data.checks.seen import Advance
from flatout.errors import require

MOST_HASHED = 6_144
"""Different pairs of the raw texts that are numbered: texts of other alphabets hold ever more."""


class BitSurvey:
    """Counts of the first pass, over the training rows; `num_records`: of all splits."""

    num_records = 0
    num_rows = 0
    num_labels = 0
    without_label = 0
    num_inputs = 0
    numbers_met = 0
    numbers: NDArray[np.int64] | None = None

    def __init__(self) -> None:
        self.hashed = GramIndex()
        self.label_counts = np.zeros(len(LABELS), dtype=np.int64)
        self.ids = RepeatedIds()


def survey_records(source: BitSource, advance: Advance) -> BitSurvey:
    """Count the grams, and the numbers of a two-step hash, of the training rows.

    It also checks the names of all records.
    """
    survey = BitSurvey()
    counts: Counter[int] = Counter()
    encode = source.reader() if source.holds_sets() else None
    for split, record in source.records(advance, with_bits=encode is not None, ids=survey.ids):
        survey.num_records += len(record.rows)
        if split != "train":
            continue
        raw = record.raw
        # Texts of other alphabets hold ever more pairs: the first ones are kept.
        if len(survey.hashed) < MOST_HASHED:
            survey.hashed.rows(pad_with_blanks(raw))
        ids, lengths = LABEL_INDEX.rows(strip_punctuation(raw))
        survey.label_counts += np.bincount(ids, minlength=len(LABELS))
        survey.num_labels += len(ids)
        survey.without_label += int((lengths == 0).sum())
        survey.num_rows += len(raw)
        if encode is not None:
            counts.update(encode(record)[0].tolist())
    survey.hashed = GramIndex(survey.hashed.names[:MOST_HASHED], is_frozen=True)
    # A model has an input for each of the commonest numbers; the others are left out of its sets.
    # They are sorted, so that an input is found by bisection.
    if counts:
        commonest_first = sorted(counts, key=lambda number: (-counts[number], number))
        commonest = commonest_first[: source.config.vocabulary]
        survey.numbers = np.sort(np.array(commonest))
        survey.numbers_met = len(counts)
        survey.num_inputs = len(commonest)
    elif encode is None:
        survey.num_inputs = source.num_bits or 0
    require(
        bool(survey.num_rows),
        "data.source",
        f"no records are left for training in {source.name}",
        hint="Give more records, or lower data.validation_share and data.test_share.",
    )
    return survey
