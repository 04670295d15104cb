"""Flat batches: padding made on demand, labels made on demand, nothing else moved."""

from __future__ import annotations

import pytest
import torch

from flatout.data.batches.flat_batch import flat_batch


def test_rows_come_shortest_first_and_padding_only_after_each_row():
    batch = flat_batch([[5, 6, 7], [8], [9, 10]])
    tokens_BL, lengths_B = batch.padded(fill=-1)
    assert tokens_BL.tolist() == [[8, -1, -1], [9, 10, -1], [5, 6, 7]]
    assert lengths_B.tolist() == [1, 2, 3]
    assert batch.rows.tolist() == [1, 2, 0]


def test_padding_to_a_multiple_adds_only_fill():
    batch = flat_batch([[5, 6, 7], [8]])
    tokens_BL, _ = batch.padded(multiple=4, fill=0)
    assert tokens_BL.tolist() == [[8, 0, 0, 0], [5, 6, 7, 0]]


def test_rows_of_one_length_are_a_view_and_not_a_copy():
    batch = flat_batch([[1, 2], [3, 4]])
    assert batch.padded()[0].data_ptr() == batch.tokens.data_ptr()


def test_ragged_labels_become_multi_hot():
    batch = flat_batch([[1], [2], [3]])
    batch.targets = torch.tensor([2, 0, 1])
    batch.target_offsets = torch.tensor([0, 1, 1, 3])
    assert batch.multi_hot(3).tolist() == [[0, 0, 1], [0, 0, 0], [1, 1, 0]]


def test_a_batch_without_labels_says_so():
    with pytest.raises(ValueError, match="no ragged labels"):
        flat_batch([[1]]).multi_hot(2)


def test_moving_a_batch_leaves_lengths_and_rows_on_the_host():
    moved = flat_batch([[1, 2], [3]]).to(torch.device("meta"))
    assert moved.tokens.device.type == "meta"
    assert moved.lengths.device.type == "cpu"
    assert moved.rows.device.type == "cpu"
