"""What networks should answer on windows and forecasts, and the last sample of each row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flatout.data.batches.flat_batch import FlatBatch, flat_batch
from flatout.data.sequences.info import SequenceShape
from flatout.models.series import answers_of, last_of, rectangle

SHAPE = SequenceShape(inputs=2, targets=2, lookback=4)


def recordings(lengths: list[int]) -> FlatBatch:
    """Samples of three columns; the last two are targets."""
    batch = flat_batch([[0] * length for length in lengths])
    return replace(batch, tokens=torch.randn(sum(lengths), 3))


@pytest.mark.parametrize("lengths", [[4, 4, 4], [1, 2, 4], [3]])
def test_a_window_is_to_answer_the_targets_at_its_last_sample(lengths):
    batch = recordings(lengths)
    last = [part[-1] for part in batch.tokens.split(lengths)]
    assert torch.equal(answers_of(batch, SHAPE), torch.stack(last)[:, 1:])
    assert torch.equal(last_of(rectangle(batch), batch), torch.stack(last))


def test_answers_of_rows_of_one_length_are_a_view():
    batch = recordings([4, 4])
    assert answers_of(batch, SHAPE)._base is batch.tokens
