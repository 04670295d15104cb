"""A simple model stands beside each run: on the same rows, within its time, from the cache, never
in the run's way.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flatout import BiLSTMConfig, TextDataConfig, fit
from flatout.config import MonitorConfig
from flatout.data import TextData
from flatout.data.problem import Problem
from flatout.data.samples.headlines import HeadlinesConfig
from flatout.data.samples.tagged_tweets import TaggedTweetsConfig
from flatout.data.tags.data import TagData
from flatout.data.texts.opening import open_source
from flatout.errors import UserError
from flatout.report.run_report import RunReport
from flatout.run import linear, rival
from flatout.run.kinds import MASKED_WORDS, TAGS, TEXTS
from flatout.run.rival import (
    COMMONEST,
    LINEAR,
    Rival,
    find_rival,
    score_commonest_tags,
    score_linear,
)
from tests.composed import compose_run

HEADLINES = HeadlinesConfig(rows=600, eval_rows=150, classes=3)


class Said(list[str]):
    """A log that keeps its lines."""

    say = list.append

    def decision(self, name: str, value: object, why: str, evidence: str) -> None:
        self.append(name)


def ready(data: Any) -> Any:
    data.run_log = Said()
    data.setup()
    return data


@pytest.fixture(scope="module")
def headlines(tmp_path_factory):
    return ready(TextData(sample=HEADLINES, cache=str(tmp_path_factory.mktemp("cache"))))


def summary_of(accuracy: float) -> dict[str, Any]:
    return {"metric": "accuracy", "metrics": {"test/loss": 0.5, "test/accuracy": accuracy}}


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_texts_of_a_split_are_those_that_the_store_was_made_of(headlines, split):
    texts = linear.texts_of(open_source(headlines.config), headlines, split)
    info = headlines.info
    encoded = info.vocabulary.encode(pa.array(texts, pa.large_string()), max_length=info.max_length)
    np.testing.assert_array_equal(encoded.tokens, info.store.splits[split].ragged("tokens").values)


def test_a_linear_model_is_judged_by_the_run_s_own_metrics(headlines):
    scores = score_linear(headlines, 60.0)
    # which chance may pass
    assert 0.6 < scores["accuracy"] <= headlines.info.ceilings["test"] + 0.05
    assert scores.keys() == {"accuracy", "macro_f1", "micro_f1", "macro_recall", "auroc"}


@pytest.mark.parametrize("problem", [Problem.multi, Problem.regression])
def test_several_labels_and_numbers_have_a_rival_too(tmp_path, problem):
    words = ["goal", "vote", "soup", "song"]
    rows = [(words[i % 4], words[i * 7 % 3], f"w{i}") for i in range(200)]
    if problem is Problem.multi:
        labels = ["|".join({a, b}) for a, b, _ in rows]
    else:
        labels = [str(len(a) + 3.0 * words.index(b)) for a, b, _ in rows]
    table = {"text": [" ".join(row) for row in rows], "label": labels}
    more = {"label_delimiter": "|"} if problem is Problem.multi else {}
    scores = score_linear(
        ready(TextData(source=table, problem=problem, cache=str(tmp_path), **more)), 60.0
    )
    assert scores["subset_accuracy" if problem is Problem.multi else "r2"] > 0.7


@pytest.mark.parametrize(
    "settings",
    [
        {"group": "user", "split_by": "group"},
        {"text": ["text", "user"], "pair": True},
    ],
    ids=["group", "pair"],
)
def test_rows_in_groups_or_in_pairs_have_a_rival(tmp_path, settings):
    table = {
        "text": [f"{('bad', 'good')[i % 2]} thing {i}" for i in range(120)],
        "label": ["no", "yes"] * 60,
    }
    table["user"] = [f"user {i % 40}" for i in range(120)]
    data = ready(TextData(source=table, cache=str(tmp_path), **settings))
    assert (
        len(linear.texts_of(open_source(data.config), data, "train"))
        == data.store.splits["train"].num_rows
    )
    assert score_linear(data, 60.0)["accuracy"] == 1


def test_rows_that_changed_meanwhile_are_not_taken_for_those_of_the_run(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        "text,label\n" + "".join(f"row {i},{'ab'[i % 2]}\n" for i in range(120)), encoding="utf-8"
    )
    data = ready(TextData(source=str(path), cache=str(tmp_path / "cache")))
    said = Said()
    path.write_text(
        path.read_text(encoding="utf-8").replace("row 7,", "row of another kind,"), encoding="utf-8"
    )
    assert find_rival(LINEAR, data, summary_of(0.5), 300.0, said) is None
    assert said[0].startswith("rival: left out: data:"), said
    assert "changed while it was read" in said[0], said


def test_words_are_answered_their_commonest_tag(tmp_path):
    data = ready(
        TagData(
            sample=TaggedTweetsConfig(rows=300, eval_rows=60), cache=str(tmp_path), max_length=200
        )
    )
    words, tags, _ = rival._tags_of(data, "train")
    test_words, test_tags, _ = rival._tags_of(data, "test")
    words = words.to_pylist()
    test_words = test_words.to_pylist()
    by_word: dict[str, Counter[int]] = defaultdict(Counter)
    for word, tag in zip(words, tags.tolist(), strict=True):
        by_word[word][tag] += 1
    common = Counter(tags.tolist()).most_common(1)[0][0]
    best = [by_word.get(word, Counter([common])) for word in test_words]
    right = [
        found[tag] == max(found.values())
        for found, tag in zip(best, test_tags.tolist(), strict=True)
    ]
    scores = score_commonest_tags(data, 60.0)
    # of equally common ones either
    assert scores["word_accuracy"] == pytest.approx(np.mean(right), abs=0.02)
    assert 0 < scores["f1"] < 1


def test_scores_come_from_the_cache_whatever_the_time(headlines):
    said = Said()
    assert find_rival(LINEAR, headlines, summary_of(0.99), 3.0, said) is None
    assert said == [
        "rival: left out: it would take 0.6 s, and may take 0.3 s; monitor.rival=always trains it"
    ]
    # as with monitor.rival=always
    first = find_rival(LINEAR, headlines, summary_of(0.99), math.inf, said)
    assert find_rival(LINEAR, headlines, summary_of(0.99), 3.0, said) == first
    assert len(said) == 1
    assert first is not None
    assert not first["wins"]


def test_a_part_of_the_rows_says_when_all_would_take_too_long(headlines, monkeypatch):
    monkeypatch.setattr(linear, "_TRIED_ROWS", 100)
    with pytest.raises(rival.TooSlow):
        score_linear(headlines, 0.001)


def test_what_goes_wrong_is_one_line(headlines, monkeypatch):
    said = Said()
    monkeypatch.setattr(rival, "_VERSION", "broken")

    def broken(data: object, limit_s: float) -> dict[str, float]:
        raise ValueError("no such thing")

    assert find_rival(Rival("rival", broken), headlines, summary_of(0.5), 300.0, said) is None
    assert said == ["rival: left out: no such thing"]


def test_the_last_lines_say_when_the_rival_wins(headlines, monkeypatch):
    monkeypatch.setattr(rival, "_VERSION", "numbers")
    own = {"metric": "rmse", "metrics": {"test/rmse": 0.3, "test/loss": 0.1}}
    said = Said()
    ridge = Rival("ridge", lambda data, limit_s: {"rmse": 0.25})
    found = find_rival(ridge, headlines, own, 300.0, said)
    assert found == {
        "name": "ridge",
        "metric": "test/rmse",
        "metrics": {"test/rmse": 0.25},
        "wins": True,
    }
    assert (
        RunReport(own | {"rival": found}).rival
        == "test/rmse 0.2500 by the ridge: it wins against 0.3000"
    )
    better = {**own, "metrics": {"test/rmse": 0.2}}
    found = find_rival(Rival("ridge", lambda data, limit_s: {}), headlines, better, 300.0, said)
    assert RunReport(better | {"rival": found}).rival == "test/rmse 0.2500 by the ridge"
    # no test rows
    assert (
        find_rival(COMMONEST, headlines, {**own, "metrics": {"val/rmse": 0.3}}, 1.0, said) is None
    )
    assert said == []
    assert RunReport({"rival": None}).rival == ""


def test_whether_a_rival_is_trained_is_one_of_three_words():
    for word in (True, False, "always"):
        assert compose_run([f"monitor.rival={word}"]).monitor.rival == word
    with pytest.raises(UserError, match=r"monitor.rival: 'maybe' \(true, false, always\)"):
        MonitorConfig(rival="maybe")


def test_masked_words_have_no_rival():
    assert MASKED_WORDS.rival is None
    assert TEXTS.rival == LINEAR
    assert TAGS.rival == COMMONEST


def test_a_run_that_always_wants_its_rival_has_it_and_trains_as_without(tmp_path):
    data = TextDataConfig(sample=HEADLINES, cache=str(tmp_path / "cache"))
    quiet: Any = {
        "tune": "off",
        "logger": "none",
        "max_epochs": 1,
        "precision": "fp32",
        "seed": 3,
    }

    def train_with_rival(name: str, wanted: bool | str) -> Any:
        monitor = MonitorConfig(progress=False, verdict=False, rival=wanted)
        return fit(
            data,
            BiLSTMConfig(hidden=8, embedding=8),
            folder=tmp_path / name,
            monitor=monitor,
            **quiet,
        )

    # a tenth of so short a run would be too little
    with_rival = train_with_rival("with", "always")
    without = train_with_rival("without", False)
    assert with_rival.metrics == without.metrics
    assert without.summary["rival"] is None
    written = json.loads((tmp_path / "with" / "summary.json").read_text(encoding="utf-8"))["rival"]
    assert written["wins"]
    assert written["metrics"]["test/accuracy"] > with_rival.metrics["test/accuracy"]
    assert "by the linear model on words and n-grams: it wins" in (
        tmp_path / "with/report.html"
    ).read_text("utf-8")
