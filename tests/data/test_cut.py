"""A batch that is cut holds the same rows, tokens and labels, piece after piece."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import cut_batch, flat_batch, piece_edges
from flatout.data.batches.plan import PlanSettings


@given(st.lists(st.integers(1, 90), min_size=1, max_size=40), st.integers(1, 50))
def test_pieces_have_a_row_each_and_none_is_far_over_its_share(lengths, count):
    lengths = np.sort(np.array(lengths))
    count = min(count, len(lengths))
    edges = piece_edges(lengths, count)
    assert edges[0] == 0
    assert edges[-1] == len(lengths)
    assert len(edges) == count + 1
    tokens = [int(lengths[start:stop].sum()) for start, stop in itertools.pairwise(edges)]
    assert all(start < stop for start, stop in itertools.pairwise(edges))
    assert max(tokens) <= lengths.sum() / count + lengths.max()


@pytest.mark.parametrize("count", [2, 3, 8, 100])
@pytest.mark.parametrize("several", [False, True], ids=["a label a row", "several labels a row"])
def test_pieces_are_the_batch_in_order(make_split, several, count):
    split = make_split([3, 5, 2, 7, 4, 4, 1, 6], several=several)
    (batch,) = Feed(split, PlanSettings(rows_per_batch=8))
    pieces = cut_batch(batch, count)
    assert len(pieces) == min(count, 8)
    assert torch.equal(torch.cat([piece.tokens for piece in pieces]), batch.tokens)
    assert torch.equal(torch.cat([piece.rows for piece in pieces]), batch.rows)
    padded, lengths = batch.padded(fill=-1)
    rows = [row[:length].tolist() for row, length in zip(padded, lengths, strict=True)]
    found = []
    for piece in pieces:
        padded, lengths = piece.padded(fill=-1)
        found += [row[:length].tolist() for row, length in zip(padded, lengths, strict=True)]
    assert found == rows
    if several:
        assert torch.equal(torch.cat([piece.multi_hot(3) for piece in pieces]), batch.multi_hot(3))
    else:
        assert torch.equal(torch.cat([piece.targets for piece in pieces]), batch.targets)
    assert [piece.ends_step for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert {piece.step_rows for piece in pieces} == {8}
    rows_before = 0
    for piece in pieces:
        assert piece.cut_from == (rows_before, 8)
        rows_before += piece.num_real


def test_labels_of_tokens_go_with_their_tokens():
    batch = flat_batch([[1, 2], [3], [4, 5, 6]])
    batch.targets = torch.arange(6)
    pieces = cut_batch(batch, 2, labels_are_of_tokens=True)
    assert [piece.targets.tolist() for piece in pieces] == [[0, 1, 2], [3, 4, 5]]


def test_rows_that_do_not_count_are_in_no_piece_unless_all_are_such():
    batch = flat_batch([[1], [2, 2], [3, 3, 3]], torch.tensor([0, 1, 2]))
    batch.num_real = 2
    assert [piece.tokens.tolist() for piece in cut_batch(batch, 2)] == [[1], [2, 2]]
    batch.num_real = 0
    assert cut_batch(batch, 2) == [batch]
