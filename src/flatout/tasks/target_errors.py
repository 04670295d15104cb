"""How far a run's answers to recordings are from the truth, added up recording after recording.

`TargetErrors` takes blocks of scaled answers and truths. It keeps sums and a sample of errors. Open
this file if `evaluate` on recordings counts wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from flatout.tasks.error_intervals import Coverage, ErrorCollector, HeldOutErrors
from flatout.tasks.sequence_scores import SequenceScores

_GROUPS = 512  # of more recordings than these the errors of several are added up for an interval


class TargetErrors:
    """Errors of answers to samples, or to windows of a forecast."""

    def __init__(
        self,
        names: Sequence[str],
        factor: Sequence[float],
        steps_ahead: int,
        held_out: HeldOutErrors | None,
    ) -> None:
        """`factor`: units of a target in one scaled unit; `steps_ahead`: 1 without a forecast.

        `held_out`: errors on the run's own validation rows, from which intervals were promised.
        """
        self._names = list(names)
        self._factor = torch.from_numpy(np.array(factor))
        self._numbers_an_answer = steps_ahead * len(self._names)
        self.scores = SequenceScores(_GROUPS, self._names, factor)
        self.coverage = Coverage.of(held_out)
        self._collector = ErrorCollector()
        self._answers_of_recordings = list[int]()
        self._answered = 0  # the sum of these
        self.rows = 0  # of which any target was measured

    def add_recording(self, blocks: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add scaled answers and truths `[N, K]` of one recording; an unknown truth is NaN."""
        group = len(self._answers_of_recordings) % _GROUPS
        answered_before = self._answered
        for answers, truths in blocks:
            self.scores.add(answers, truths, torch.full((len(answers),), group))
            self.rows += int((~truths.isnan()).any(1).sum())
            distances = (answers - truths).abs() * self._factor
            self.coverage.add(distances.numpy())
            # of a forecast all steps ahead of a window are one answer
            of_answers = distances.reshape(-1, self._numbers_an_answer)
            self._collector.add(of_answers, np.arange(len(of_answers)) + self._answered)
            self._answered += len(of_answers)
        self._answers_of_recordings.append(self._answered - answered_before)

    def held_out(self, window: int) -> HeldOutErrors | None:
        """A sample of the errors; None without any.

        `window`: samples that an answer reads, or steps of a forecast; 0 where all are read.
        """
        counts = self._answers_of_recordings
        recording_of_answers = np.repeat(np.arange(len(counts)), counts)
        # A network that answers each sample has no window: a single recording is one stretch then.
        return self._collector.held_out(recording_of_answers, window or max(1, self._answered))
