"""The convolutional model answers each row as if it were alone."""

from __future__ import annotations

import re

import pytest
import torch

from flatout.data.batches.flat_batch import flat_batch
from flatout.errors import UserError
from flatout.models.textcnn import TextCNN, TextCNNConfig

ROWS = [[4, 5, 6, 7, 8], [9], [3, 4], [5, 6, 7], [8, 9, 3, 4, 5, 6, 7]]


def make(widths: list[int]) -> TextCNN:
    config = TextCNNConfig(
        embedding=6, filters=5, widths=widths, dropout=0.0, embedding_dropout=0.0
    )
    return config.build(num_outputs=3, vocabulary_size=10)


def one_row_alone(model: TextCNN, row: list[int]) -> torch.Tensor:
    """Every window by itself, over the row between zeros: half a filter's width, rounded down, on
    either side.
    """
    words = model.embedding(torch.tensor(row))
    highest = []
    for conv in model.filters:
        width = conv.weight.shape[-1]
        beside = words.new_zeros(width // 2, words.shape[1])
        between = torch.cat([beside, words, beside])
        windows = torch.stack([between[i : i + width] for i in range(len(between) - width + 1)])
        answers = torch.einsum("nwe,few->nf", windows, conv.weight) + conv.bias
        highest.append(answers.relu().amax(0))
    return model.output(torch.cat(highest))


def answer_and_gradients(model: TextCNN, logits: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    logits.square().sum().backward()
    return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


# Rows shorter than the widest filter, one token alone, and a batch whose rows are all as long as
# each other.
@pytest.mark.parametrize("rows", [ROWS, [[9]], [[3, 4], [5, 6]]])
@pytest.mark.parametrize(
    "widths",
    [
        [1],
        [2],
        [3],
        [2, 3, 4],
        [5, 6],
    ],
)
def test_outputs_and_gradients_equal_each_row_alone(widths, rows):
    model = make(widths)
    batch = flat_batch(rows)
    together = answer_and_gradients(model, model(batch))
    alone = answer_and_gradients(
        model, torch.stack([one_row_alone(model, rows[i]) for i in batch.rows.tolist()])
    )
    for ours, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
        assert ours.isfinite().all()


@pytest.mark.parametrize(
    "widths",
    [
        [3],
        [2, 3, 4],
        [5, 6],
    ],
)
def test_a_row_answers_the_same_whoever_its_neighbours_are(widths):
    model = make(widths)
    torch.testing.assert_close(
        model(flat_batch(ROWS))[1], model(flat_batch([[3, 4]]))[0], atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize(
    "widths",
    [
        [3],
        [2, 3],
        [5, 6],
    ],
)
def test_what_lies_in_the_padding_changes_nothing(widths):
    model = make(widths)
    expected = model(flat_batch(ROWS))
    model.padding_id = 7
    assert torch.equal(model(flat_batch(ROWS)), expected)


@pytest.mark.parametrize("rows", [ROWS, [[3, 4], [5, 6]]])
def test_nothing_is_asked_of_the_device(rows):
    # Tensors without storage stand for a device's: reading a value or a shape from one fails.
    device = torch.device("meta")
    logits = make([2, 3]).to(device)(flat_batch(rows).to(device))
    logits.sum().backward()
    assert logits.shape == (len(rows), 3)


def test_bf16_autocast_stays_near_fp32():
    model = make([2, 3])
    batch = flat_batch(ROWS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(batch)
    torch.testing.assert_close(found.float(), model(batch), atol=0.03, rtol=0.05)


def test_weights_saved_and_loaded_give_the_same_answers(tmp_path):
    model = make([2, 3])
    other = make([2, 3])
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(model(flat_batch(ROWS)), other(flat_batch(ROWS)))


def test_computed_tokens_count_the_padding():
    assert make([2]).computed_tokens(flat_batch(ROWS)) == 35


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("filters", 0),
        ("widths", []),
        ("widths", [3, 0]),
        ("dropout", 1.0),
        ("embedding", -1),
    ],
)
def test_settings_out_of_range_name_themselves(field, value):
    with pytest.raises(UserError, match=re.escape(f"model.{field}: {value}")):
        TextCNNConfig(**{field: value})
