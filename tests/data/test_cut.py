"""A batch that is cut holds the same rows, tokens and labels, piece after piece."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.batches.feed import Feed
from flatout.data.batches.flat_batch import FlatBatch, cut_batch, flat_batch, piece_edges
from flatout.data.batches.plan import PlanSettings


@given(st.lists(st.integers(1, 90), min_size=1, max_size=40), st.integers(1, 50))
def test_pieces_have_a_row_each_and_none_is_far_over_its_share(lengths, count):
    lengths = np.sort(np.array(lengths))
    count = min(count, len(lengths))
    edges = piece_edges(lengths, count)
    assert edges[0] == 0
    assert edges[-1] == len(lengths)
    assert len(edges) == count + 1
    spans = list(itertools.pairwise(edges))
    assert all(start < stop for start, stop in spans)
    tokens = [int(lengths[start:stop].sum()) for start, stop in spans]
    share = lengths.sum() / count
    assert max(tokens) <= share + lengths.max()


def tokens_of_rows(batch: FlatBatch) -> list[list[int]]:
    padded, lengths = batch.padded(fill=-1)
    return [row[:length].tolist() for row, length in zip(padded, lengths, strict=True)]


@pytest.mark.parametrize("count", [2, 3, 8, 100])
@pytest.mark.parametrize("several", [False, True], ids=["a label a row", "several labels a row"])
def test_pieces_are_the_batch_in_order(make_split, several, count):
    split = make_split([3, 5, 2, 7, 4, 4, 1, 6], several=several)
    (batch,) = Feed(split, PlanSettings(rows_per_batch=8))
    pieces = cut_batch(batch, count)
    assert len(pieces) == min(count, 8)
    tokens = torch.cat([piece.tokens for piece in pieces])
    assert torch.equal(tokens, batch.tokens)
    rows = torch.cat([piece.rows for piece in pieces])
    assert torch.equal(rows, batch.rows)
    found = []
    for piece in pieces:
        found += tokens_of_rows(piece)
    assert found == tokens_of_rows(batch)
    if several:
        labels = torch.cat([piece.multi_hot(3) for piece in pieces])
        assert torch.equal(labels, batch.multi_hot(3))
    else:
        labels = torch.cat([piece.targets for piece in pieces])
        assert torch.equal(labels, batch.targets)
    *before, last = pieces
    assert last.ends_step
    assert not any(piece.ends_step for piece in before)
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
    first, second = cut_batch(batch, 2)
    assert first.tokens.tolist() == [1]
    assert second.tokens.tolist() == [2, 2]
    batch.num_real = 0
    assert cut_batch(batch, 2) == [batch]
