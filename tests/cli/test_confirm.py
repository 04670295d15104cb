"""`doctor RUN --confirm` runs the override and the original in turn, keeps what came, refuses what
it cannot run.
"""

from __future__ import annotations

import json
import shutil

import pytest

from flatout.cli import doctor
from flatout.cli.doctor import train_apart, with_override
from flatout.distributed.processes import warm_start
from flatout.errors import UserError
from flatout.perf.measure.intervals import SpeedupInterval
from flatout.perf.verdict.confirmation import (
    FILE,
    LEAST_STEPS,
    OverrideConfirmation,
    keep_confirmation,
    read_confirmations,
)
from flatout.perf.verdict.evidence import Evidence
from flatout.report.summary import read_summary
from tests.verbs import verb

WORDS = [
    "data.sample.eval_rows=40",
    "data.batch_size=8",
    "model.embedding=8",
    "model.hidden=8",
    "logger=none",
]
WORDS += [
    "trainer.max_epochs=1",
    "monitor.progress=false",
    "monitor.verdict=false",
    "logger=none",
    "trainer.accelerator=cpu",
]
SLOW = ["+callbacks.mine._target_=tests.cli.slow.Slow"]


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory):
    """A run of a file of rows that a callback holds back."""
    warm_start()
    place = tmp_path_factory.mktemp("confirm")
    words = ["bad", "good"]
    rows = [f"word{number % 50} {words[number % 2]} day,{number % 2}" for number in range(600)]
    (place / "rows.csv").write_text("text,label\n" + "\n".join(rows), encoding="utf-8")
    words = [*WORDS, f"data.source={place}/rows.csv", f"data.cache={place}/cache", *SLOW]
    train_apart([*words, "+allow_targets=[tests]"], place / "run")
    return place / "run"


@pytest.fixture
def copy(slow_run, tmp_path):
    return shutil.copytree(slow_run, tmp_path / "run")


def typed_again(run) -> list[str]:
    """The words of a run that `--confirm` asks for once more: where its stores lie."""
    words = (run / "overrides.txt").read_text(encoding="utf-8").splitlines()
    return [word for word in words if word.startswith("data.cache=")]


@pytest.mark.soak(seconds=6)
def test_a_fix_is_run_beside_the_original_and_what_came_is_kept_beside_the_run(
    copy, monkeypatch, capsys
):
    monkeypatch.setattr(doctor, "ROUNDS", 1)
    words = ["+allow_targets=[tests]", *typed_again(copy)]
    assert verb("doctor", copy, "--confirm", *words) == 0
    said = capsys.readouterr().out
    assert "in turn with the settings as they were" in said
    assert "~callbacks.mine: predicted " in said
    assert ", measured " in said
    kept = json.loads((copy / FILE).read_text(encoding="utf-8"))["confirmations"][0]
    assert kept["override"] == "~callbacks.mine"
    assert 60 <= kept["steps"] <= 300
    assert kept["measured"]["value"] > 1.5
    assert kept["predicted"]["low"] > 1.2
    assert [len(side) for side in kept["rates"]] == [1, 1]
    assert verb("doctor", copy) == 0
    assert "confirmed ~callbacks.mine: predicted" in capsys.readouterr().out


@pytest.mark.soak(seconds=3)
def test_a_package_is_trusted_only_by_the_command_line(copy, capsys):
    assert verb("doctor", copy, "--confirm", *typed_again(copy)) == 2
    said = capsys.readouterr().err
    assert "not trusted" in said
    assert len(said.strip().splitlines()) == 1


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert verb("doctor", tmp_path, "--confirm") == 2
    assert "no summary.json there" in capsys.readouterr().err


@pytest.mark.soak(seconds=3)
def test_a_run_of_another_version_is_refused(copy, capsys):
    summary = read_summary(copy)
    summary["versions"]["flatout"] = "0.0.1"
    (copy / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert verb("doctor", copy, "--confirm") == 2
    assert "trained by flatout 0.0.1" in capsys.readouterr().err
    assert verb("doctor", copy) == 0  # its verdict can be read


def test_a_summary_of_another_schema_is_refused_in_one_sentence(copy, capsys):
    (copy / "summary.json").write_text(
        json.dumps(read_summary(copy) | {"schema": 99}), encoding="utf-8"
    )
    assert verb("doctor", copy) == 2
    assert "whose summary.json this version cannot read" in capsys.readouterr().err


def test_evidence_that_another_version_wrote_otherwise_is_refused_in_one_sentence(copy, capsys):
    summary = read_summary(copy)
    summary["evidence"]["tried"] = [{"what": "else"}]
    (copy / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert verb("doctor", copy) == 2
    assert "cannot read" in capsys.readouterr().err


def test_a_run_whose_data_are_gone_is_refused_with_what_is_missing(
    copy, slow_run, tmp_path, capsys
):
    words = (copy / "overrides.txt").read_text(encoding="utf-8")
    (copy / "overrides.txt").write_text(words.replace("rows.csv", "gone.csv"), encoding="utf-8")
    words = ["+allow_targets=[tests]", *typed_again(copy)]
    assert verb("doctor", copy, "--confirm", *words) == 2
    said = capsys.readouterr().err
    assert "gone.csv" in said
    assert len(said.strip().splitlines()) == 1


def test_words_that_give_other_settings_are_refused(tmp_path):
    then = {"model.hidden": 8, "data.source": "a.csv", "seed": 0}
    doctor.require_same(tmp_path, then, set(), dict(then))
    doctor.require_same(tmp_path, then, {"seed"}, then | {"seed": 1})
    with pytest.raises(UserError, match=r"model\.hidden was 8 and is 128"):
        doctor.require_same(tmp_path, then, set(), then | {"model.hidden": 128})


def test_a_run_without_an_override_has_nothing_to_confirm(copy, capsys):
    summary = read_summary(copy)
    summary["evidence"] |= {
        "callbacks": {},
        "ms": {"forward": 5.0, "backward": 5.0},
        "counts": {},
    }
    (copy / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    assert verb("doctor", copy, "--confirm") == 2
    assert "nothing to confirm" in capsys.readouterr().err


def test_words_without_confirm_are_refused(copy, capsys):
    assert verb("doctor", copy, "a=1") == 2
    assert "words belong to --confirm" in capsys.readouterr().err


def test_a_repeated_run_has_its_measured_answers_and_trusts_nothing_by_its_files(copy):
    summary = read_summary(copy) | {"tune": {"values": {"data.feed": "threaded", "compile": False}}}
    (copy / "overrides.txt").write_text(
        "a=1\ntune=auto\noutput=x\n+allow_targets=[b]\nhydra.run.dir=y\n~c\n-m\n"
    )
    words = doctor.read_words(copy, summary, ["b=2"])
    assert words[:2] == ["a=1", "~c"]
    assert set(words) >= {
        "data.feed=threaded",
        "compile=false",
        "b=2",
        "tune=off",
    }
    assert not any(
        word.startswith(("output", "+allow", "hydra", "-m", "tune=auto")) for word in words
    )


@pytest.mark.parametrize(
    ("override", "rows", "steps"),
    [
        ("data.feed=threaded", 8, 200),
        ("data.batch_size=16", 8, 100),
        ("data.batch_size=512", 8, LEAST_STEPS),
        ("data.batch_size=32 data.accumulate=1", 8, 200),
        ("data.accumulate=8", 8, 100),
    ],
)
def test_both_sides_train_the_same_number_of_rows(override, rows, steps):
    evidence = Evidence(
        device="cpu", steps=500, batches=2000, rows_per_batch=rows, batch_size=rows, accumulate=4
    )
    if "accumulate" not in override:
        evidence.accumulate = 1
    sides = doctor.build_sides(["data.batch_size=8"], override, evidence, 200)
    assert [side[-1] for side in sides] == [
        "++trainer.max_steps=200",
        f"++trainer.max_steps={steps}",
    ]


@pytest.mark.parametrize(
    ("typed", "override", "fixed"),
    [
        (
            ["data.feed=workers", "threads=2"],
            "data.feed=resident",
            ["threads=2", "data.feed=resident"],
        ),
        (
            ["+trainer.val_check_interval=5"],
            "++trainer.val_check_interval=1.0",
            ["++trainer.val_check_interval=1.0"],
        ),
        (
            ["a=1", "+callbacks.plant._target_=x.Y", "+callbacks.plant.ms=12"],
            "~callbacks.plant",
            ["a=1"],
        ),
        (["experiment=mine"], "~callbacks.plant", ["experiment=mine", "~callbacks.plant"]),
        (
            ["data.batch_size=4"],
            "data.batch_size=32 data.accumulate=1",
            ["data.batch_size=32", "data.accumulate=1"],
        ),
    ],
)
def test_an_override_takes_the_place_of_what_was_typed(typed, override, fixed):
    assert with_override(typed, override) == fixed


def kept_one(override: str, value: float) -> OverrideConfirmation:
    gain = SpeedupInterval(value, value * 0.9, value * 1.1)
    return OverrideConfirmation(
        override=override,
        predicted=gain,
        measured=gain,
        steps=60,
        rates=((1.0,), (value,)),
        device="x",
        version="1",
    )


def test_a_later_confirmation_of_an_override_replaces_the_earlier_one(tmp_path):
    for override, value in (
        ("a=1", 1.5),
        ("b=1", 0.5),
        ("a=1", 2.0),
    ):
        keep_confirmation(tmp_path, kept_one(override, value))
    found = read_confirmations(tmp_path)
    assert [(each.override, each.measured.value) for each in found] == [("a=1", 2.0), ("b=1", 0.5)]
    assert found[0].helps
    assert found[1].slows
    assert found[0].holds


def test_a_damaged_confirmation_is_named_and_counts_as_none(tmp_path):
    (tmp_path / FILE).write_text('{"schema": 1, "confirmations": [{}]}', encoding="utf-8")
    with pytest.warns(UserWarning, match="is damaged"):
        assert read_confirmations(tmp_path) == []
