"""Two groups of runs, paired by seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flatout.errors import UserError
from flatout.ladder.compare_runs import compare_groups, summaries_in
from flatout.report.summary import empty_summary
from tests.verbs import verb


def write_run(
    folder: Path, seed: int, value: float, *, metric: str = "accuracy", status: str = "finished"
) -> None:
    folder.mkdir(parents=True)
    metrics = {f"test/{metric}": value, f"val/{metric}": 0.5}
    found = empty_summary() | {
        "seed": seed,
        "status": status,
        "metric": metric,
        "metrics": metrics,
    }
    (folder / "summary.json").write_text(json.dumps(found))


@pytest.fixture
def groups(tmp_path):
    for seed, (before, after) in enumerate(
        [
            (0.80, 0.81),
            (0.90, 0.91),
            (0.70, 0.71),
        ]
    ):
        write_run(tmp_path / "a" / f"run-{seed}", seed, before)
        write_run(tmp_path / "b" / f"run-{seed}", seed, after)
    return tmp_path / "a", tmp_path / "b"


def test_runs_are_paired_by_their_seeds(groups):
    found = compare_groups(*groups)
    assert found.seeds == [0, 1, 2]
    assert found.difference.value == pytest.approx(1.0)
    assert found.difference.high - found.difference.low < 1e-6, "each pair differs by the same"
    assert found.lines() == ["the second is better by 1 points (95 % interval 1 to 1)"]


def test_the_command_prints_both_groups_and_the_sentence(groups, capsys):
    assert verb("compare", *groups) == 0
    printed = capsys.readouterr().out
    assert "80 ± 10" in printed
    assert "seed 2" in printed
    folders = [folder.relative_to(groups[0].parents[1]) for folder in groups]
    assert f"{folders[1]} is better by 1 points (95 % interval 1 to 1)" in printed


def test_a_seed_without_partner_and_a_run_that_failed_are_left_out_by_name(groups):
    write_run(groups[0] / "more", 7, 0.1)
    write_run(groups[1] / "failed", 8, 0.1, status="failed")
    found = compare_groups(*groups)
    assert found.seeds == [0, 1, 2]
    assert any("seed 7: the other group has none" in line for line in found.notes)
    assert any(line.endswith("failed: failed") for line in found.notes)


@pytest.mark.parametrize("metric", ["rmse", "perplexity", "my_error"])
def test_an_error_is_no_share_and_smaller_is_better(tmp_path, metric):
    for name, values in (("a", (2.0, 2.5)), ("b", (1.0, 1.5))):
        for seed, value in enumerate(values):
            write_run(tmp_path / name / str(seed), seed, value, metric=metric)
    lines = compare_groups(tmp_path / "a", tmp_path / "b").lines()
    assert lines == [
        f"the second is better by 1 in {metric}, where less is better (95 % interval 1 to 1)"
    ]


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ([0.4], [0.663], "the second is better by 26.3 points (a single pair of runs: it may be"),
        (
            [0.7, 0.8],
            [0.6, 0.75],
            "the first is better by 7.5 points (95 % interval -24.3 to 39.3,",
        ),
        ([0.7], [0.7], "both are equal"),
    ],
)
def test_the_sentence_names_the_better_one_and_what_may_be_chance(tmp_path, before, after, says):
    for name, values in (("a", before), ("b", after)):
        for seed, value in enumerate(values):
            write_run(tmp_path / name / str(seed), seed, value)
    (sentence,) = compare_groups(tmp_path / "a", tmp_path / "b").lines()
    assert sentence.startswith(says)


def test_of_two_runs_with_one_seed_the_newer_counts(groups):
    write_run(groups[0] / "again", 1, 0.5)
    found = compare_groups(*groups)
    assert found.first.values == pytest.approx((80.0, 50.0, 70.0))
    assert found.notes == [
        f"left out: {groups[0] / 'run-1'}: a newer run has seed 1, too",
    ]


def test_a_sweep_without_confirming_runs_is_a_table_of_its_trials(tmp_path, capsys):
    (tmp_path / "sweep.json").write_text("{}")
    (tmp_path / "sweep.csv").write_text(
        "number,status,value,model.hidden,val/accuracy,note,folder\n"
        "0,complete,0.85123,8,0.85123,,0\n"
        "1,failed,,16,,no memory,1\n"
        "2,running\n"
    )
    assert verb("compare", tmp_path) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["number", "status", "value", "model.hidden", "note"] in lines
    assert ["0", "complete", "0.8512", "8"] in lines
    assert ["1", "failed", "16", "no", "memory"] in lines
    assert ["2", "running"] in lines, "half a row"
    assert verb("compare", tmp_path, tmp_path) == 2
    assert f"python -m flatout compare {tmp_path} lists its trials" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "a,b\n1,2\n",
        "number,status\n",
        f"number,status\n0,{'x' * 200_000}\n",
        f"{'x' * 200_000}\n{'x' * 200_000}\n",
    ],
)
def test_a_table_of_trials_that_is_damaged_is_refused(text, tmp_path, capsys):
    (tmp_path / "sweep.csv").write_text(text)
    assert verb("compare", tmp_path) == 2
    assert "sweep.csv: holds no trials" in capsys.readouterr().err


def test_one_run_alone_is_refused_in_words_of_runs(groups, capsys):
    assert verb("compare", groups[0]) == 2
    assert "(two folders of runs, or one folder of a sweep)" in capsys.readouterr().err


def test_groups_that_were_judged_on_other_rows_are_compared_with_a_line_that_says_so(groups):
    for seed in range(3):
        file = groups[1] / f"run-{seed}" / "summary.json"
        found = json.loads(file.read_text())
        found["data"] |= {
            "source": "more.csv",
            "rows": {
                "train": 9_000,
                "val": 500,
                "test": 1_000,
            },
        }
        file.write_text(json.dumps(found))
    first, *_ = compare_groups(*groups).lines()
    assert first == "judged on other rows: 0 val rows of None; and 1,000 test rows of more.csv"


def test_of_a_sweep_the_confirming_runs_count(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sweep.json").write_text("{}")
        write_run(tmp_path / name / "0", 0, 0.99)
        write_run(tmp_path / name / "confirm-0", 1, 0.8)
    found = compare_groups(tmp_path / "a", tmp_path / "b")
    assert (found.seeds, found.first.mean) == ([1], pytest.approx(80.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda a, b: [write_run(a / "again", 1, 0.5), (a / "sweep.csv").touch()],
            "several finished runs with seed 1. Name one of them; python -m flatout compare",
        ),
        (
            lambda a, b: write_run(b / "other", 9, 0.5, metric="macro_f1"),
            "has runs by accuracy and by macro_f1",
        ),
    ],
)
def test_groups_that_cannot_be_compared_are_refused(groups, change, message, capsys):
    change(*groups)
    assert verb("compare", *groups) == 2
    assert message in capsys.readouterr().err


def test_groups_without_a_common_seed_are_refused(tmp_path):
    write_run(tmp_path / "a" / "0", 0, 0.5)
    write_run(tmp_path / "b" / "1", 1, 0.5)
    with pytest.raises(UserError, match=r"no seed is in both groups \(seeds 0 and 1\)"):
        compare_groups(tmp_path / "a", tmp_path / "b")


def test_a_sweep_without_confirming_runs_is_refused(tmp_path, groups):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "sweep.json").write_text("{}")
    write_run(tmp_path / "s" / "0", 0, 0.9)
    assert not summaries_in(tmp_path / "s")
    with pytest.raises(UserError, match="holds no confirming runs"):
        compare_groups(tmp_path / "s", groups[0])
