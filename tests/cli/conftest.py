"""A finished run on headlines, and rows that it answers."""

from __future__ import annotations

import pytest

from flatout import BiLSTMConfig, HeadlinesConfig, TextDataConfig, fit


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verbs")
    data = TextDataConfig(
        sample=HeadlinesConfig(rows=400, eval_rows=80, classes=3), cache=str(folder / "cache")
    )
    return fit(data, BiLSTMConfig(embedding=8, hidden=8), epochs=1, output=str(folder / "runs"))


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        'id,text,label\n1,"a senate, a ballot",politics\n2,,sport\n3,striker playoff goal,sport\n'
    )
    return str(path)
