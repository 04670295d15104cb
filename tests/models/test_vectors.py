"""Word vectors from a text file: known words get theirs, others keep what they had."""

from __future__ import annotations

import gzip

import pytest
import torch

from flatout.errors import UserError
from flatout.models.bilstm import BiLSTMConfig
from flatout.models.vectors import load_vectors

WORDS = {"<pad>": 0, "cat": 1, "dog": 2, "zebra": 3}


@pytest.mark.parametrize("header", ["", "3 2\n"])
@pytest.mark.parametrize("zipped", [False, True])
def test_known_words_get_their_vectors(tmp_path, header, zipped):
    path = tmp_path / ("vectors.txt.gz" if zipped else "vectors.txt")
    text = f"{header}cat 1 2\ndog 3.5 -4\nunheard 9 9\n".encode()
    path.write_bytes(gzip.compress(text) if zipped else text)
    embedding = torch.full((4, 2), 7.0)
    assert load_vectors(str(path), WORDS, embedding) == 0.5
    assert embedding.tolist() == [[7, 7], [1, 2], [3.5, -4], [7, 7]]


def test_a_line_of_another_width_is_named(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text("cat 1 2\ndog 3\n")
    with pytest.raises(UserError, match=r"vectors.txt:2: 1 numbers for 'dog' \(model.embedding is 2\)"):
        load_vectors(str(path), WORDS, torch.zeros(4, 2))


def test_a_missing_file_is_named():
    with pytest.raises(UserError, match=r"model.vectors: no such file: nowhere.txt"):
        load_vectors("nowhere.txt", WORDS, torch.zeros(4, 2))


def test_frozen_vectors_are_not_trained(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text("cat 1 2\n")
    config = BiLSTMConfig(embedding=2, hidden=2, vectors=str(path), freeze_vectors=True)
    model = config.build(num_outputs=2, vocabulary_size=4, vocabulary=WORDS)
    assert model.vectors_found == 0.25
    assert not model.embedding.weight.requires_grad
    assert model.embedding.weight[1].tolist() == [1, 2]
