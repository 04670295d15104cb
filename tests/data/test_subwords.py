"""Tokenizers of transformers give here what they give there."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refused
from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flatout.data.tokens.subwords import PAIR, Subwords
from flatout.data.tokens.vocabulary import VocabularyConfig
from flatout.errors import UserError

TEXTS = [
    "The senate votes on the budget",
    "café naïve votes",
    "cup final tonight !",
    "",
    "budget " * 30,
]


@pytest.fixture(scope="module")
def subwords() -> Subwords:
    return Subwords.train(
        [pa.array(TEXTS * 3, pa.large_string())], VocabularyConfig(size=80, min_frequency=1)
    )


@pytest.fixture(scope="module")
def theirs(subwords, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    subwords.save(folder)
    return AutoTokenizer.from_pretrained(folder)


def rows_of(block) -> list[list[int]]:
    rows = []
    start = 0
    for length in block.lengths:
        rows.append(block.tokens[start : start + length].tolist())
        start += length
    return rows


@given(st.lists(st.text(max_size=40) | st.sampled_from(TEXTS), max_size=8), st.integers(3, 40))
def test_texts_become_the_ids_that_transformers_makes_of_them(subwords, theirs, texts, longest):
    texts = [text.replace(PAIR, " ").encode("utf-8", "ignore").decode() for text in texts]
    found = rows_of(subwords.encode(pa.array(texts, pa.large_string()), max_length=longest))
    assert found == [
        theirs(text, truncation=True, max_length=longest)["input_ids"] for text in texts
    ]


@pytest.mark.parametrize("longest", [8, 12, 60])
def test_pairs_become_the_ids_that_transformers_makes_of_them(subwords, theirs, longest):
    pairs = [
        ("budget votes", "the cup"),
        ("the", "budget " * 20),
        ("budget " * 20, "cup"),
        ("", "cup"),
    ]
    column = pa.array([PAIR.join(pair) for pair in pairs], pa.large_string())
    found = rows_of(subwords.encode(column, max_length=longest))
    assert found == [
        theirs(*pair, truncation="longest_first", max_length=longest)["input_ids"] for pair in pairs
    ]


def test_a_character_of_private_use_in_one_text_makes_no_pairs_of_all(subwords):
    texts = ["the cup", "a \ue003 budget"]
    found = rows_of(subwords.encode(pa.array(texts, pa.large_string()), max_length=60))
    assert found == [
        *rows_of(subwords.encode(pa.array(texts[:1], pa.large_string()), max_length=60)),
        *rows_of(subwords.encode(pa.array(texts[1:], pa.large_string()), max_length=60)),
    ]
    (frame,) = rows_of(subwords.encode(pa.array([""], pa.large_string()), max_length=60))
    assert len(frame) == 2
    assert found[0][-1] == frame[-1]
    assert frame[-1] not in found[0][:-1]


def test_each_word_of_a_list_begins_at_one_token_and_words_that_do_not_fit_are_counted(
    subwords, theirs
):
    rows = [["senate", "unheardof", "votes"], [], ["\x00", "cup"], ["budget"] * 20]
    found = subwords.encode_words(pa.array(rows, pa.list_(pa.large_string())), max_length=12)
    expected = theirs(rows[:2], is_split_into_words=True)
    assert rows_of(found.block)[:2] == expected["input_ids"]
    firsts = [
        index
        for index, number in enumerate(expected.word_ids(0))
        if number is not None and number != (expected.word_ids(0)[index - 1])
    ]
    assert [place for place in range(found.block.lengths[0]) if found.firsts[place]] == firsts
    assert found.word_counts.tolist()[:3] == [3, 0, 2]
    assert 0 < found.word_counts[3] < 20
    assert found.firsts.sum() == found.word_counts.sum()


def test_word_pieces_are_the_same_in_every_process(subwords):
    program = (
        "import pyarrow as pa\nfrom flatout.data.tokens.subwords import Subwords\n"
        "from flatout.data.tokens.vocabulary import VocabularyConfig\n"
        f"texts = pa.array({TEXTS * 3!r}, pa.large_string())\n"
        "print(Subwords.train([texts], VocabularyConfig(size=80, min_frequency=1)).fingerprint())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == subwords.fingerprint()


def test_pieces_that_begin_a_word_are_told_from_those_within(subwords):
    pieces = [
        subwords.tokenizer.id_to_token(number)
        for number in subwords.tokenizer.encode("budget votes").ids
    ]
    assert pieces[0] == "[CLS]"
    assert "".join(pieces[1:-1]).replace("##", "") == "budgetvotes"
    assert sum(not piece.startswith("##") for piece in pieces[1:-1]) == 2


def test_a_tokenizer_is_kept_whole_with_all_of_its_files(subwords, tmp_path):
    again = Subwords.from_json(subwords.to_json())
    assert again.files == subwords.files
    assert again.fingerprint() == subwords.fingerprint()
    texts = pa.array(TEXTS, pa.large_string())
    assert (
        again.encode(texts, max_length=9).tokens.tolist()
        == subwords.encode(texts, max_length=9).tokens.tolist()
    )


def test_a_tokenizer_that_knows_no_letter_a_has_its_special_tokens_around_a_text():
    # Letters of a genome alone, and no unknown token: "a" becomes nothing.
    vocabulary = {"[CLS]": 0, "[SEP]": 1, "[PAD]": 2, "G": 3, "T": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["[CLS]", "[SEP]", "[PAD]"])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    block = Subwords.of(fast).encode(pa.array(["GT"]), max_length=9)
    assert block.tokens.tolist() == [0, 3, 4, 1]


def test_templates_of_chats_which_lie_in_a_folder_are_left_out(subwords, tmp_path):
    subwords.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    theirs.chat_template = {"default": "{{ messages }}", "short": "{{ messages[0] }}"}
    of_theirs = Subwords.of(theirs)
    assert "additional_chat_templates" not in of_theirs.files
    texts = pa.array(TEXTS, pa.large_string())
    expected = subwords.encode(texts, max_length=9).tokens.tolist()
    assert of_theirs.encode(texts, max_length=9).tokens.tolist() == expected


def test_a_folder_without_the_files_of_its_tokenizer_is_refused(tmp_path):
    # from it alone a tokenizer without words is made
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with refused("model.pretrained, data.tokenizer", "no words", fix="data.tokenizer="):
        Subwords.load(str(tmp_path))


def test_a_tokenizer_that_is_nowhere_is_one_message_with_the_ways_out(tmp_path):
    with pytest.raises(UserError) as told:
        Subwords.load(str(tmp_path / "nowhere"))
    for way in ("local folder", "HF_HOME", "model.pretrained=null"):
        assert way in str(told.value)
