"""What a run's own model says of the rows, when it is trained again in the folds of the audit.

Its answers stand beside words and n-grams, as those of `encoder_view` do: each comes from a
training that has not seen the row. The trainings themselves belong to the run, so the caller hands
in a function that does them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from flatout.audit.measure import scale_answers
from flatout.audit.rows import AuditRows, Objects, deal_folds
from flatout.run_log import Say

# (texts, labels, classes, folds) → `[N, C]` probabilities of texts, or of all words of sentences;
# None where the trainings take too long, or fail
TrainInFolds = Callable[
    [Objects, Objects, Sequence[str], NDArray[np.int64]], NDArray[np.float64] | None
]


def read_network(
    rows: AuditRows, num_folds: int, train_in_folds: TrainInFolds, say: Say
) -> csr_matrix | None:
    """A row of features for each row of the audit; None where there are no answers."""
    folds = deal_folds(rows, num_folds)
    if rows.sentences is None:
        labels = np.array(rows.classes, object)[rows.labels]
        answers = train_in_folds(rows.texts, labels, rows.classes, folds)
    else:
        # A tagger learns from whole sentences; a row then has the mean of its words.
        sentences = rows.sentences
        folds_of_sentences = sentences.find_folds(rows, folds)
        answers = train_in_folds(sentences.words, sentences.tags, rows.classes, folds_of_sentences)
        if answers is not None:
            answers = rows.average_words(answers)
    if answers is None:
        return None
    num_unread = int((~answers.any(axis=1)).sum())
    if num_unread:
        say(f"network: {num_unread:,} rows lie beyond data.max_length; words alone judge them")
    return scale_answers(answers)
