"""Encoding by the block is the same as encoding each row alone, and says what it lost."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.tokens.vocabulary import UNKNOWN_ID, Vocabulary, VocabularyConfig, VocabularyKind
from flatout.errors import UserError

TEXTS = [
    "The cat sat on the mat .",
    "the dog , the cat and the mat",
    "a dog sat",
    "Déjà vu on the mat !",
] * 3
VOCABULARIES = {
    kind: Vocabulary.train(
        [pa.array(TEXTS)], VocabularyConfig(kind=kind, min_frequency=1, size=400)
    )
    for kind in VocabularyKind
}
any_texts = st.lists(st.text(max_size=40), min_size=1, max_size=12)


@pytest.mark.parametrize("kind", list(VocabularyKind))
@given(texts=any_texts)
def test_a_block_is_encoded_as_each_row_alone_would_be(kind, texts):
    vocabulary = VOCABULARIES[kind]
    block = vocabulary.encode(pa.array(texts, pa.string()), max_length=1000)
    rows = np.split(block.tokens, np.cumsum(block.lengths)[:-1])
    for text, row in zip(texts, rows, strict=True):
        clean = re.sub("[\ue000-\ue002]", " ", text)
        assert row.tolist() == (
            vocabulary.tokenizer.encode(clean, add_special_tokens=False).ids or [UNKNOWN_ID]
        )


@given(any_texts, st.integers(1, 6))
def test_cutting_keeps_the_first_tokens_and_counts_the_rest(texts, max_length):
    vocabulary = VOCABULARIES[VocabularyKind.word]
    array = pa.array(texts, pa.string())
    whole = vocabulary.encode(array, max_length=1000)
    cut = vocabulary.encode(array, max_length=max_length)
    rows = np.split(whole.tokens, np.cumsum(whole.lengths)[:-1])
    assert cut.tokens.tolist() == [token for row in rows for token in row[:max_length]]
    assert cut.truncated_rows == sum(len(row) > max_length for row in rows)
    assert cut.truncated_tokens == len(whole.tokens) - len(cut.tokens)


def test_the_vocabulary_keeps_the_commonest_words_that_are_common_enough():
    texts = pa.array(["a a a b b c", "a b"])
    assert set(
        Vocabulary.train([texts], VocabularyConfig(min_frequency=2)).tokenizer.get_vocab()
    ) >= {"a", "b"}
    assert (
        "c"
        not in Vocabulary.train([texts], VocabularyConfig(min_frequency=2)).tokenizer.get_vocab()
    )
    assert Vocabulary.train(
        [texts], VocabularyConfig(min_frequency=1, size=4)
    ).tokenizer.get_vocab().keys() >= {"a"}


def test_case_and_accents_fold_as_asked():
    accents = Vocabulary.train(
        [pa.array(["É é e"])], VocabularyConfig(min_frequency=1, strip_accents=True)
    )
    tokens = accents.encode(pa.array(["E É e é"]), max_length=9).tokens
    assert len(set(tokens.tolist())) == 1
    cased = Vocabulary.train(
        [pa.array(["A a"])], VocabularyConfig(min_frequency=1, lowercase=False)
    )
    assert len(set(cased.encode(pa.array(["A a"]), max_length=9).tokens.tolist())) == 2


def test_unknown_words_are_counted():
    block = VOCABULARIES[VocabularyKind.word].encode(
        pa.array(["the zebra sat", "qqq"]), max_length=9
    )
    assert block.unknown == 2


def test_a_vocabulary_survives_being_written():
    vocabulary = VOCABULARIES[VocabularyKind.bpe]
    again = Vocabulary.from_json(vocabulary.to_json())
    assert again.tokenizer.get_vocab() == vocabulary.tokenizer.get_vocab()
    texts = pa.array(TEXTS)
    assert (
        again.encode(texts, max_length=9).tokens.tolist()
        == vocabulary.encode(texts, max_length=9).tokens.tolist()
    )


def test_a_size_without_room_for_words_is_refused():
    with pytest.raises(UserError, match=r"data.vocabulary.size: 3 \(above 3\)"):
        VocabularyConfig(size=3)
