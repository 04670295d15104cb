"""What the bytes of texts tell, against looking at each text by itself."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from flatout.data.checks.characters import ODDITIES, decode_escapes, read_characters
from flatout.data.tables.splits import hash_texts

texts = st.lists(st.text(max_size=15), min_size=1, max_size=20)
ascii_texts = st.lists(
    st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"]), max_size=15),
    min_size=1,
)


def array(rows) -> pa.Array:
    return pa.array(rows, pa.large_string())


@given(ascii_texts)
def test_words_are_counted_as_the_tokenizer_parts_them(rows):
    plain = pre_tokenizers.Whitespace()
    assert read_characters(array(rows)).words.tolist() == [
        len(plain.pre_tokenize_str(row)) for row in rows
    ]


@given(texts, st.data())
def test_a_text_tells_the_same_in_any_block(rows, data):
    whole = read_characters(array(rows))
    start = data.draw(st.integers(0, len(rows) - 1))
    part = read_characters(array(rows).slice(start))
    for name in ("exact", "alike", "words"):
        np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[start:])


def test_case_blanks_and_marks_make_no_difference_to_what_is_alike():
    alike = read_characters(
        array(["Hello, World!", "hello world", "HELLOWORLD", "hello word", "École", "école !"])
    ).alike
    assert alike[0] == alike[1] == alike[2] != alike[3]
    assert alike[4] == alike[5]


def test_texts_of_nothing_but_marks_are_alike_when_they_are_equal():
    alike = read_characters(array([":)", ":(", ":)", "", " "])).alike
    assert alike[0] == alike[2]
    assert len(set(alike.tolist())) == 4


def test_what_is_alike_has_the_hash_that_splits_go_by():
    rows = ["A b!", "?!", "", "École x", "  ", "A-1", "...", "naïve"]
    plain = ["ab", "?!", "", "écolex", "  ", "a1", "...", "naïve"]
    alike = read_characters(array(rows)).alike
    np.testing.assert_array_equal(alike, hash_texts(array(plain)))
    assert alike[:4].tolist() == [
        4840452455224541020,
        5755534605173046083,
        12035550249420947055,
        11681786407112395888,
    ]


def thue_and_morse(length: int) -> str:
    """Whose polynomials modulo 2^64 are those of the same word with its letters exchanged."""
    return "".join("ab"[number.bit_count() % 2] for number in range(length))


def test_texts_whose_sums_are_equal_are_told_apart():
    word = thue_and_morse(2_048)
    others = word.translate(str.maketrans("ab", "ba"))
    sums = hash_texts(array([word, others]))
    assert sums[0] == sums[1]
    exact = read_characters(array([word, others, word])).exact
    assert exact[0] == exact[2] != exact[1]


ODD_TEXTS = {
    "control": "a\x07b",
    "escapes": r"it\u2019s",
    "entities": "you &amp; me",
    "invisible": "zero\u200bwidth",
    "replaced": "caf\ufffd",
    "private": "\uf8ff pie",
    "mojibake": "cafÃ©",
}


def test_each_oddity_is_found_where_it_is_and_nowhere_else():
    assert ODD_TEXTS.keys() == ODDITIES.keys()
    fine = ["plain", "naïve café", "a & b", "tab\there", "c:\\new", "👩‍👩‍👧 family", "line\nend"]
    block = array([*fine, *ODD_TEXTS.values()])
    found = {name: rows.tolist() for name, rows in read_characters(block).odd.items()}
    assert found == {name: [len(fine) + number] for number, name in enumerate(ODD_TEXTS)}


def test_escapes_are_decoded_and_half_of_a_pair_stays():
    rows = [
        r"it\u2019s",
        r"\ud83d\ude00!",
        r"half \ud83d",
        "&lt;b&gt; &#39;",
        r"caf\xe9",
        "plain",
        None,
    ]
    decoded, changed = decode_escapes(array(rows))
    assert decoded.to_pylist() == ["it’s", "😀!", r"half \ud83d", "<b> '", "café", "plain", None]
    assert changed.tolist() == [0, 1, 2, 3, 4]
