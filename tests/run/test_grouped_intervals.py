"""Rows of one `data.group` resemble each other, so the interval of a score draws them together."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from flatout import BiLSTMConfig, Result, TextDataConfig
from flatout.data.tokens.vocabulary import VocabularyConfig
from flatout.inference.text import Predictor
from flatout.tasks.score_intervals import bootstrap
from tests.fitting import own_cache, quiet_fit
from tests.run_files import read_log, write_jsonl
from tests.verbs import verb

ROWS_OF_AN_AUTHOR = 6


def rows_by(authors: int, seed: int) -> dict[str, list[Any]]:
    """Texts of so many authors; the writing of one is the same, and so are mistakes on it."""
    random = np.random.default_rng(seed)
    words = random.choice("oak fern rose slate flint basalt".split(), (authors, 4))
    labels = random.choice(["plant", "stone"], authors)
    return {
        "text": [" ".join(each) for each in words.repeat(ROWS_OF_AN_AUTHOR, 0)],
        "label": labels.repeat(ROWS_OF_AN_AUTHOR).tolist(),
        "author": [f"author {row // ROWS_OF_AN_AUTHOR}" for row in range(len(words) * 6)],
    }


def train(folder: Any, authors: int) -> Result:
    data = TextDataConfig(
        train=rows_by(20, 1),
        validation=rows_by(12, 2),
        test=rows_by(authors, 3),
        split_by="group",
        group="author",
        vocabulary=VocabularyConfig(min_frequency=1),
    )
    return quiet_fit(data, BiLSTMConfig(embedding=8, hidden=8), epochs=1, folder=folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("grouped")
    with own_cache(place):
        yield train(place / "run", 15)


def test_the_test_score_s_interval_draws_authors_and_not_rows(run):
    rows = rows_by(15, 3)
    answers = [answer.label for answer in Predictor.load(run.folder).predict(rows["text"])]
    is_right = np.array(answers) == np.array(rows["label"])
    of_authors = is_right.reshape(15, ROWS_OF_AN_AUTHOR).sum(1)
    sums = torch.from_numpy(np.stack([of_authors, np.full(15, ROWS_OF_AN_AUTHOR)], 1)).double()
    expected = bootstrap(sums, lambda sums: {"accuracy": sums[:, 0] / sums[:, 1]})["accuracy"]
    assert run.summary["intervals"]["test/accuracy"] == pytest.approx(expected)
    line = "test: intervals draw the 15 groups of data.group, not single rows"
    assert line in read_log(run.folder)


def test_evaluate_draws_groups_where_the_file_has_their_column(run, tmp_path, capsys):
    columns = rows_by(15, 3)
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    ends = run.summary["intervals"]["test/accuracy"]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    assert verb("evaluate", run.folder, file, "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["intervals"]["accuracy"] == pytest.approx(ends)
    assert verb("evaluate", run.folder, file) == 0
    assert "intervals draw the 15 groups of author, not single rows" in capsys.readouterr().out
    for row in rows:
        del row["author"]
    file = write_jsonl(tmp_path / "nobody.jsonl", rows)
    assert verb("evaluate", run.folder, file, "--json") == 0
    low, high = json.loads(capsys.readouterr().out)["intervals"]["accuracy"]
    assert high - low < 0.6 * (ends[1] - ends[0])


def test_fewer_than_ten_groups_have_no_interval_and_the_run_says_so(tmp_path):
    few = train(tmp_path / "run", 9)
    assert few.summary["intervals"] == {}
    line = "no intervals: they need 10 groups of data.group, and these rows are of 9"
    assert line in read_log(few.folder)
