"""Texts that occur more than once, against comparing every row with every other."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.data.checks.record_files import RECORD, RecordFiles
from flatout.data.checks.twins import find_twins
from flatout.errors import UserError

TEXTS = ["one", "One", "two", "Two!", "three"]
rows = st.lists(
    st.tuples(st.sampled_from(TEXTS), st.integers(0, 1), st.integers(0, 2)), max_size=25
)


def plainly(text: str) -> str:
    return text.strip("!").lower()


def records_of(given_rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    records = np.zeros(len(given_rows), RECORD)
    for number, (text, code, split) in enumerate(given_rows):
        alike = sorted({plainly(each) for each in TEXTS}).index(plainly(text))
        exact = TEXTS.index(text)
        records[number] = (alike << 60 | 7, exact, 0, number, code, split)
    return records, records["code"].copy(), records["table"].copy()


@given(rows)
def test_twins_are_what_comparing_all_pairs_finds(given_rows):
    found = find_twins(*records_of(given_rows))
    for number, (text, code, split) in enumerate(given_rows):
        before = given_rows[:number]
        train = [row for row in before if row[2] == 0]
        alike = [row[0] for row in given_rows if row[2] == 0 and plainly(row[0]) == plainly(text)]
        assert found.repeated[number] == (
            split == 0 and any(row[:2] == (text, code) for row in train)
        )
        assert found.alike[number] == (split == 0 and text != alike[0])
        assert found.conflict[number] == any(
            row[0] == text and row[1] != code for row in given_rows
        )
        assert found.exact_splits[number] == sum(
            {1 << row[2] for row in given_rows if row[0] == text}
        )
        assert found.alike_splits[number] == sum(
            {1 << row[2] for row in given_rows if plainly(row[0]) == plainly(text)}
        )


@pytest.mark.parametrize("buffering", [0, -1])
def test_a_full_disk_of_temporary_files_is_named_by_its_variable(buffering):
    message = (
        r"^TMPDIR: no space left in /\S+: [\d,]+ MB free\. Set TMPDIR to a folder of a disk with"
        rf" more room: comparing texts takes {RECORD.itemsize} bytes a row there\.$"
    )
    with ExitStack() as full, pytest.raises(UserError, match=message):
        files = full.enter_context(closing(RecordFiles()))
        for file in files._files:
            file.close()
        full_disk = Path("/dev/full")
        files._files = [full_disk.open("r+b", buffering) for _ in files._files]
        for _ in range(9):
            files.add(np.zeros(100, RECORD))
        list(files.parts())


@given(rows, st.integers(1, 5))
def test_records_come_back_from_the_files_with_equal_hashes_together(given_rows, pieces):
    records = records_of(given_rows)[0]
    with closing(RecordFiles()) as files:
        for piece in np.array_split(records, pieces):
            files.add(piece)
        parts = list(files.parts())
        again = list(files.parts())
    back = np.concatenate(parts)
    assert sorted(back["row"].tolist()) == list(range(len(records)))
    assert np.array_equal(back, np.concatenate(again))
    assert all(len(set(part["alike"] >> np.uint64(58))) <= 1 for part in parts)
