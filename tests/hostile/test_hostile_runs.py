"""Folders of runs, and ladders, that others have made: their words let nothing in, and their links
lead nothing out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import train
from flatout.__main__ import main
from flatout.cli import audit, doctor, run_arguments, sweep
from flatout.errors import UserError
from flatout.ladder.rungs import ladder_of
from flatout.report.summary import read_summary, versions
from flatout.run.run_folder import require_no_link_outside
from flatout.sweep.searched import read_asked
from flatout.sweep.settings import SweeperSettings
from flatout.sweep.space import SettingInterval, SettingValues
from flatout.sweep.study import Study
from flatout.sweep.trial import Ending, Status
from tests.hostile import attempts as hostile
from tests.hostile.targets import Case
from tests.refusals import refused

ENVIRONMENT_IN_A_NAME = "data.source=somebody/$\\{oc.env:HOME\\}"
WORDS = {
    "an endpoint": "data.source='s3://bucket/x?endpoint_override=127.0.0.1:9&scheme=http'",
    "an escaped address": "data.source=s3:\\//bucket/x",
    "the environment": "data.source='somebody/${oc.env:HOME}'",
    "the environment behind a backslash": ENVIRONMENT_IN_A_NAME,
    "a cache elsewhere": "data.cache=/somewhere/else",
    "a receiver": "logger.mlflow.tracking_uri=http://127.0.0.1:9",
    "a team": "logger.wandb.entity=somebody",
    "a receiver of another name": "logger.mine.tracking_uri=/somewhere/else",
    "commands for a cluster": "launcher.setup=[evil]",
    "another place to run": "on=ray",
}
TUNED: dict[str, dict[str, Any]] = {
    "trust": {"+allow_targets": "[evil]", "+callbacks.x._target_": "evil.Evil"},
    "trust for Hydra": {"+allow_targets": "[evil]", "+hydra.callbacks.x._target_": "evil.Evil"},
    "an address": {"data.source": "'s3://bucket/x?endpoint_override=127.0.0.1:9'"},
    "trust in a value": {"precision": "fp32 +allow_targets=[evil] +callbacks.x._target_=evil.Evil"},
    "an address in a value": {"data.feed": "threaded data.source=s3://bucket/x"},
    "a folder": {"hydra.run.dir": "<outside>/x", "output": "<outside>"},
}


def run_of_others(folder: Path, words: list[str], tuned: dict[str, Any]) -> Path:
    """A folder that says of a run what its maker likes."""
    folder.mkdir(parents=True)
    (folder / "overrides.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    summary = {
        "schema": 1,
        "status": "finished",
        "versions": versions(),
        "training": {"seconds": 1.0},
        "tune": {"values": tuned},
    }
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", WORDS)
def test_words_of_a_run_s_folder_that_let_something_in_are_typed_again(name, tmp_path):
    word = WORDS[name]
    folder = run_of_others(tmp_path / "run", ["data=headlines", word], {})
    summary = json.loads((folder / "summary.json").read_text())
    for read in (
        lambda more: audit._read_run(folder, more)[0],
        lambda more: doctor.read_words(folder, summary, more),
    ):
        with pytest.raises(UserError, match="type it again") as refused:
            read([])
        assert word in str(refused.value)
        assert read([word]).count(word) == 1


@pytest.mark.parametrize("name", TUNED)
def test_what_a_summary_says_was_measured_brings_in_no_other_words(name):
    with hostile.bait() as place:
        tuned = json.loads(json.dumps(TUNED[name]).replace("<outside>", str(place / "outside")))
        folder = run_of_others(place / "work" / "outputs" / "run", [*hostile.TINY], tuned)
        found = hostile.outcome(place, lambda: require_harmless_words(folder))
        assert not found.is_executed
        assert "Error" not in found.said


def require_harmless_words(folder: Path) -> None:
    """Read a folder's words in both ways; a refusal is welcome, and not needed."""
    summary = json.loads((folder / "summary.json").read_text())
    for read in (audit._read_run, lambda folder, more: (doctor.read_words(folder, summary, more),)):
        try:
            words = read(folder, [])[0]
        except UserError:
            continue
        keys = {word.partition("=")[0].lstrip("+") for word in words}
        assert not [key for key in keys if key.startswith(("allow", "callbacks", "hydra", "out"))]
        assert "://" not in "".join(words)


def test_audit_of_a_run_of_others_runs_nothing_and_asks_no_server():
    with hostile.bait() as place:
        folder = run_of_others(
            place / "work" / "outputs" / "run", ["data=headlines"], TUNED["trust"]
        )
        found = hostile.outcome(place, lambda: main(["audit", str(folder), "folds=1"]))
        assert found.is_refused, found.said
        assert not found.is_executed


def test_the_override_of_a_verdict_of_others_is_typed_again(tmp_path):
    for override in ("+allow_targets=[evil]", "+hydra.callbacks.x._target_=evil.Evil", *WORDS):
        word = WORDS.get(override, override)
        with pytest.raises(UserError, match="type it again"):
            doctor.require_typed_again(word.split(), [], "run")


def test_a_sweep_of_others_reads_no_environment_behind_a_backslash(tmp_path):
    known = {"schema": 1, "fixed": [], "search": {}, "space": {}, "place": str(tmp_path)}
    for word in (
        "name=$\\{oc.env:HOME\\}",
        "data.cache=/somewhere/else",
        "launcher.setup=[evil]",
    ):
        (tmp_path / "sweep.json").write_text(json.dumps(known | {"typed": [word]}))
        with pytest.raises(UserError, match="type it again"):
            sweep.run(argparse.Namespace(words=["resume", str(tmp_path)], config_dir=None))


def test_a_journal_of_others_brings_in_no_value_that_the_sweep_does_not_search(tmp_path):
    def study(sources: tuple[str, ...], low: float) -> Study:
        space = {"data.source": SettingValues(sources), "optim.lr": SettingInterval(low, 1.0)}
        return Study(tmp_path, space, SweeperSettings(trials=1), mode="max", validations=None)

    evil = study(("s3://bucket?endpoint_override=evil",), 0.5)
    number, _ = evil.ask()
    evil.tell(number, Ending(Status.complete, 1.0, value=1.0, metrics={}))
    for sources, low in (
        (("a.csv", "b.csv"), 0.5),
        (("s3://bucket?endpoint_override=evil",), 0.99),
    ):
        with pytest.raises(UserError, match="does not search"):
            study(sources, low)


@pytest.mark.parametrize(
    "word",
    [
        ENVIRONMENT_IN_A_NAME,
        "data.source='somebody/${oc.env:HOME}'",
        "data.source=s3:\\//bucket/x",
        "data.source=s3:/bucket/x",
        "data.cache=/somewhere/else",
        "data={cache:/somewhere/else}",
        "data.source='${data.label}//attacker/x'",
        "data.source='${oc.${task.kind}:HOME}'",
        "data.source=[a.csv,file:x]",
        "data.source=dir::/x",
        "data.source='file:x'",
        "+trainer.model_registry=x",
        "+trainer={model_registry:x}",
        "+allow_targets=[evil]",
        "+callbacks.x._target_=evil.Evil",
        "hydra.run.dir=/somewhere/else",
        "output=/somewhere/else",
        "trainer.logger={_target_:evil.Evil}",
    ],
)
@pytest.mark.parametrize("place", ["settings", "run"])
def test_a_ladder_of_others_names_values_only(word, place):
    rungs: list[dict[str, Any]] = [
        {"name": "as written"},
        {"name": "evil", "run": [word] if place == "run" else ["precision=fp32"]},
    ]
    written = {
        "title": "evil",
        "kind": "text",
        "program": "headlines",
        "rungs": rungs,
        "settings": [word] if place == "settings" else [],
    }
    with pytest.raises(UserError):
        ladder_of("evil", yaml.safe_load(yaml.safe_dump(written)), "evil.yaml")


LINKS = ("log.txt", "metrics.csv", ".lock", "model", "csv/from-step-2", "tensorboard")


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("is_dangling", [False, True])
def test_links_that_lead_out_of_a_run_s_folder_are_refused(name, is_dangling, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(outside / "new" if is_dangling else outside)
    with pytest.raises(UserError, match="leads out of the folder"):
        require_no_link_outside(tmp_path / "run")


def test_links_inside_of_a_run_s_folder_stay(tmp_path):
    (tmp_path / "run" / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "best").symlink_to("step-1")
    require_no_link_outside(tmp_path / "run")
    require_no_link_outside(tmp_path / "not there yet")


@pytest.mark.parametrize("name", ["log.txt", "metrics.csv"])
def test_a_run_of_others_that_is_resumed_writes_into_no_file_outside(name):
    with hostile.bait() as place:
        folder = run_of_others(place / "work" / "outputs" / "theirs", [], {})
        (folder / name).symlink_to(place / "outside" / "kept.txt")
        words = [*hostile.TINY, "model.hidden=8", f"resume={folder}"]
        found = hostile.outcome(place, lambda: train.main(words))
        assert found.is_refused
        assert "leads out of the folder" in found.said
        assert not found.is_executed


@pytest.mark.parametrize("name", ["log.txt", "metrics.csv"])
def test_a_resumed_run_leaves_a_file_of_yours_that_has_a_second_name_in_its_folder(name):
    with hostile.bait() as place:
        folder = run_of_others(place / "work" / "outputs" / "theirs", [], {})
        yours = place / "outside" / "kept.txt"
        before = yours.read_bytes()
        (folder / name).unlink(missing_ok=True)
        (folder / name).hardlink_to(yours)
        hostile.outcome(place, lambda: train.main([*hostile.TINY, f"resume={folder}"]))
        assert yours.read_bytes() == before


def test_a_file_resumes_no_run_outside_of_the_folder_of_runs():
    with hostile.bait() as place:
        folder = run_of_others(place / "outside" / "run", [], {})
        text = f"# @package _global_\nresume: {folder}\n"
        found = hostile.tried(Case("", ("+experiment=evil",), {"experiment/evil.yaml": text}))
        assert found.is_refused
        assert "resume" in found.said
        assert "outside of the folder of all runs" in found.said
        typed = hostile.tried(Case("", (f"resume={folder}",)))
        assert not typed.is_refused


SETTINGS_OF_OTHERS = (
    "7",
    "[1]",
    "{",
    "\0",
    "data: 7",
    "!!python/object/apply:os.mkdir ['canary']",
    "data: {read: {encoding: {a: 1}}}",
    "data: {read: {columns: 7}}",
    "data: {read: {quote: [1]}}",
    "data: {read: {encoding: zlib_codec}}",
)


@pytest.mark.parametrize("text", SETTINGS_OF_OTHERS)
def test_odd_settings_in_a_run_s_folder_are_refused_by_predict(text, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError):
        run_arguments._reading_of_run(file)
    file.write_text("data: {read: {delimiter: ;, of_another_version: 1}}", encoding="utf-8")
    assert run_arguments._reading_of_run(file)["delimiter"] == ";"


def test_json_without_end_in_a_run_s_folder_is_refused(tmp_path):
    run_of_others(tmp_path / "run", [], {})
    for file in ("summary.json", "sweep.json"):
        (tmp_path / "run" / file).write_text('{"schema": ' + "[" * 100_000)
    for read in (read_summary, read_asked):
        with pytest.raises(UserError, match="not valid JSON"):
            read(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text("data: " + "[" * 500)
    with pytest.raises(UserError, match="holds no settings"):
        run_arguments._reading_of_run(tmp_path / "run" / "config.yaml")


def test_settings_of_a_run_of_others_write_no_escape_codes(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text('data: {read: {quote: "\\e", columns: ["a\\e[2J"]}}')
    (tmp_path / "model").mkdir()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "model" / file).touch()
    run_arguments.choose_reading(argparse.Namespace(run=tmp_path, read=[]))
    said = capsys.readouterr().err
    assert "read as in training" in said
    assert "\x1b" not in said


@pytest.mark.parametrize("section", ["tune", "metrics", "evidence", "choices", "training"])
@pytest.mark.parametrize("value", [7, "x"])
def test_odd_sections_of_a_summary_are_refused(section, value, tmp_path):
    folder = run_of_others(tmp_path / "run", [], {})
    summary = json.loads((folder / "summary.json").read_text())
    assert read_summary(folder)["versions"] == versions()
    (folder / "summary.json").write_text(json.dumps(summary | {section: value}))
    with pytest.raises(UserError, match=section):
        read_summary(folder)


def test_a_folder_of_runs_elsewhere_is_typed_again_for_a_sweep_of_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # resuming goes to the folder that the file names
    folder = tmp_path / "runs" / "name" / "time"
    folder.mkdir(parents=True)

    def resume(output: Path | str, *more: str) -> list[str]:
        asked = {"schema": 1, "typed": [f"output={output}"], "fixed": [], "search": {}}
        asked |= {"place": str(tmp_path), "space": {}, "conf": None}
        (folder / "sweep.json").write_text(json.dumps(asked), encoding="utf-8")
        return sweep._prepare_resume([str(folder), *more], [])

    with refused("sweep resume", "output=/home", fix="type it again"):
        resume(Path("/home"))
    with refused("sweep resume", "output=[", fix="type it again"):
        resume("[")  # Hydra cannot read it
    assert "output=/home" in resume(Path("/home"), "output=/home")
    assert f"output={tmp_path / 'runs'}" in resume(tmp_path / "runs")  # where it lies
