"""Rows on disk: whatever a text holds, it is read as it was written."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest

from flatout.ladder.rows import join_texts, read_rows


@pytest.mark.parametrize(
    "text", ["two\nlines", 'a "quoted" word', "a, comma", "NA", "007", "", "  "]
)
def test_a_text_is_read_as_it_was_written(text, tmp_path):
    table = pa.table({"text": [text, "plain"], "label": ["1", "true"]})
    pa_csv.write_csv(table, tmp_path / "train.csv")
    assert read_rows(tmp_path / "train.csv").to_pydict() == table.to_pydict()


def test_line_breaks_are_read_in_files_of_many_blocks(tmp_path):
    # a reader that takes each line for a row fails where a block of 1 MiB ends inside of a text
    texts = [f"row {number}\n" + "a line of some words\n" * 12 for number in range(12_000)]
    pa_csv.write_csv(pa.table({"text": texts, "label": ["x"] * len(texts)}), tmp_path / "train.csv")
    found = read_rows(tmp_path / "train.csv")
    assert found["text"].to_pylist() == texts


def test_joined_texts_are_long_and_mostly_of_their_label():
    texts = [f"{('dog', 'cat')[number % 2]} {number}" for number in range(400)]
    table = pa.table({"text": texts, "label": ["x", "y"] * 200})
    joined = join_texts(table, least=3, most=5)
    lines = [text.split("\n") for text in joined["text"].to_pylist()]
    assert len(lines) == 100
    assert {len(each) for each in lines} == {3, 4, 5}
    shares_of_label = []
    for lines_of_text, label in zip(lines, joined["label"].to_pylist(), strict=True):
        word = {"x": "dog", "y": "cat"}[label]
        of_label = sum(line.startswith(word) for line in lines_of_text)
        shares_of_label.append(of_label / len(lines_of_text))
    assert np.mean(shares_of_label) > 0.65, "half are drawn from the label, half from all rows"
