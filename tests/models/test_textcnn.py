"""The convolutional model answers each row as if it were alone."""

from __future__ import annotations

import pytest
import torch

from flatout.data.batch import flat_batch
from flatout.models.textcnn import TextCNN, TextCNNConfig

ROWS = [[4, 5, 6, 7, 8], [9], [3, 4], [5, 6, 7], [8, 9, 3, 4, 5, 6, 7]]


def make(widths: list[int]) -> TextCNN:
    config = TextCNNConfig(embedding=6, filters=5, widths=widths, dropout=0.0, embedding_dropout=0.0)
    return config.build(num_outputs=3, vocabulary_size=10)


@pytest.mark.parametrize("widths", [[1], [2], [3], [2, 3, 4], [5, 6]])
def test_outputs_and_gradients_equal_each_row_alone(widths):
    model = make(widths)
    batch = flat_batch(ROWS)
    together = model(batch)
    together.square().sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    alone = torch.cat([model(flat_batch([ROWS[i]])) for i in batch.rows.tolist()])
    alone.square().sum().backward()
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)


def test_what_lies_in_the_padding_changes_nothing():
    model = make([2, 3])
    expected = model(flat_batch(ROWS))
    model.padding_id = 7
    assert torch.equal(model(flat_batch(ROWS)), expected)


def test_a_filter_sees_over_the_ends_of_a_row_as_if_zeros_stood_there():
    model = make([3])
    row = torch.tensor([3, 4])
    padded = torch.cat([torch.zeros(1, 6), model.embedding(row), torch.zeros(1, 6)])
    conv = model.filters[0]
    windows = torch.stack([padded[i : i + 3].T for i in range(2)])
    answers = torch.einsum("nec,fec->nf", windows, conv.weight) + conv.bias
    expected = model.output(answers.relu().amax(0))
    torch.testing.assert_close(model(flat_batch([[3, 4]]))[0], expected, atol=1e-6, rtol=1e-5)
