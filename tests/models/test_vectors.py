"""Word vectors from a text file: known words get theirs, others keep what they had."""

from __future__ import annotations

import gzip
import subprocess
import sys

import pytest
import torch

from flatout.errors import UserError
from flatout.models.bilstm import BiLSTMConfig
from flatout.models.textcnn import TextCNNConfig
from flatout.models.words import load_vectors

WORDS = {
    "<pad>": 0,
    "cat": 1,
    "dog": 2,
    "zebra": 3,
}


@pytest.mark.parametrize("header", ["", "3 2\n", "3 2 \n"])
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
    with pytest.raises(
        UserError, match=r"vectors.txt:2: 1 numbers for 'dog' \(model.embedding is 2\)"
    ):
        load_vectors(str(path), WORDS, torch.zeros(4, 2))


def test_a_file_of_another_width_says_which_setting_fits(tmp_path):
    for first in ("400000 300", "unheard " + " ".join(["1"] * 300)):
        path = tmp_path / "vectors.txt"
        path.write_text(f"{first}\n")
        with pytest.raises(
            UserError, match=r"vectors.txt:1: 300 numbers a word .* Set model.embedding=300."
        ):
            load_vectors(str(path), WORDS, torch.zeros(4, 2))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("dog 3 x", r":2: 'x' is not a number"),
        ("dog 1 2 3", r":2: 3 numbers for 'dog'"),
        ("dog nan 1", r":2: the numbers of 'dog' are not finite"),
        # cut short, though nobody asked for the word
        ("unheard 3", r":2: 1 numbers for 'unheard'"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, complaint):
    path = tmp_path / "vectors.txt"
    path.write_text(f"cat 1 2\n{line}\n")
    with pytest.raises(UserError, match=complaint):
        load_vectors(str(path), WORDS, torch.zeros(4, 2))


def test_words_with_blanks_in_them_are_not_taken_for_their_first_part(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text("cat 1 2\ndog food 8 9\n\ndog 3 4\ndog 5 6\n")
    embedding = torch.zeros(4, 2)
    assert load_vectors(str(path), WORDS, embedding) == 0.5
    assert embedding[2].tolist() == [3, 4]  # and of a word that stands there twice the first counts


def test_words_and_numbers_are_told_apart_in_any_alphabet(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_bytes("größe -1e-2 +2.5\r\nno\u00a0break 1 1\r\n猫 .5 6 \r\n".encode())
    embedding = torch.zeros(3, 2)
    assert (
        load_vectors(
            str(path),
            {
                "größe": 0,
                "猫": 1,
                "no\u00a0break": 2,
            },
            embedding,
        )
        == 1.0
    )
    torch.testing.assert_close(embedding, torch.tensor([[-0.01, 2.5], [0.5, 6], [1, 1]]))


def test_a_file_cut_short_by_a_broken_download_is_named(tmp_path):
    whole = gzip.compress(b"".join(b"cat%d 1 2\n" % i for i in range(1000)))
    for name, content in {"half.gz": whole[:-20], "other.gz": b"cat 1 2\n"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}: not a whole gzip file"):
            load_vectors(str(tmp_path / name), WORDS, torch.zeros(4, 2))


@pytest.mark.parametrize("kind", [BiLSTMConfig, TextCNNConfig])
def test_vectors_without_a_vocabulary_are_a_mistake(tmp_path, kind):
    path = tmp_path / "vectors.txt"
    path.write_text("cat 1 2\n")
    with pytest.raises(UserError, match=r"model.vectors: no vocabulary"):
        kind(embedding=2, vectors=str(path)).build(num_outputs=2, vocabulary_size=4)


def test_a_missing_file_is_named():
    with pytest.raises(UserError, match=r"model.vectors: no such file: nowhere.txt"):
        load_vectors("nowhere.txt", WORDS, torch.zeros(4, 2))


@pytest.mark.parametrize("config", [BiLSTMConfig, TextCNNConfig])
def test_there_is_nothing_to_freeze_without_vectors(config):
    with pytest.raises(UserError, match=r"model.freeze_vectors: is set without model.vectors"):
        config(freeze_vectors=True)


def test_frozen_vectors_are_not_trained(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text("cat 1 2\n")
    config = BiLSTMConfig(embedding=2, hidden=2, vectors=str(path), freeze_vectors=True)
    model = config.build(num_outputs=2, vocabulary_size=4, vocabulary=WORDS)
    assert model.vectors_found == 0.25
    assert not model.embedding.weight.requires_grad
    assert model.embedding.weight[1].tolist() == [1, 2]


def test_words_that_are_not_found_keep_their_random_start(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text("cat 1 2\n")
    built = []
    for vectors in (None, str(path)):
        torch.manual_seed(1)
        config = BiLSTMConfig(embedding=2, hidden=2, vectors=vectors)
        built.append(
            config.build(num_outputs=2, vocabulary_size=4, vocabulary=WORDS).embedding.weight
        )
    assert torch.equal(built[0][2:], built[1][2:])
    assert built[1][1].tolist() == [1, 2]


def test_the_models_import_neither_transformers_nor_lightning():
    code = (
        "import sys, flatout.models; print([m for m in ('transformers', 'lightning', 'hydra') if m"
        " in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
