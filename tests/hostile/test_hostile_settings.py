"""Files of settings that ask for little: a name with braces, a list in place of a name, an escaped
`$`, a link. Each was once taken.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants
from hydra.core.utils import setup_globals
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationValidationError, OmegaConfBaseException

from flatout.cli.composing import without_value
from flatout.cli.hydra_check import _check_list_of_trials, _require_no_secret_in_clear
from flatout.cli.hydra_folders import _require_plain_launcher, check_folders
from flatout.cli.kept_help import checksum_of
from flatout.cli.targets import check_targets
from flatout.cli.typed import (
    check_growth,
    check_read_early,
    check_values,
    check_values_of_hydra,
    is_named_like_a_setting,
    secret_keys,
)
from flatout.cli.words import refuse_forbidden_options, require_folders
from flatout.config import RunConfig
from flatout.data.tables.hub import from_hub
from flatout.data.tables.reading import ReadingConfig
from flatout.data.tables.sources import open_source, open_splits
from flatout.engine.optimizer import OptimizerName
from flatout.errors import UserError
from flatout.files import require_modest
from flatout.models.encoder.transformer import TransformerConfig, _set_one
from flatout.sweep.settings import LauncherSettings
from tests.composed import run_train
from tests.hostile import attempts as hostile
from tests.hostile.sending import ENVIRONMENT, SECRET
from tests.hostile.targets import Case

CHECKPOINT = "lightning.pytorch.callbacks.ModelCheckpoint"
TENSORBOARD = "lightning.pytorch.loggers.TensorBoardLogger"
CSV = "lightning.pytorch.loggers.CSVLogger"
_GLOBALS = "{epoch].__class__.__repr__.__globals__[torch]"
FILENAMES = {
    "a variable of the environment": f"{_GLOBALS}.os.environ[FLATOUT_HOSTILE}}",
    "the sign that parts folders": f"{_GLOBALS}.os.sep[0}}tmp/x",
    "a filling with slashes": "{epoch:/>9}x",
    "a character by its number": "{epoch:c}",
    "a metric named like a path": "{/tmp/x}",
    "a brace that is not closed": "{",
    "a whole number's form of a metric": "{val/loss:,d}",
    "a number": 3,
}


SOAK = pytest.mark.soak(seconds=3)


def said_of(settings: dict[str, object] | str, *words: str) -> str:
    """What is said of an experiment of others, which must be refused with nothing done."""
    written = settings if isinstance(settings, str) else yaml.safe_dump(settings)
    files = {"experiment/evil.yaml": f"# @package _global_\n{written}"}
    case = Case("evil", ("+experiment=evil", *words), files, ENVIRONMENT, is_whole=True)
    found = hostile.tried(case)
    assert found.is_refused, found.said
    assert not found.is_executed
    assert SECRET not in found.said
    return found.said


def check_part(settings: dict[str, Any]) -> None:
    """Check a class and its arguments as those of a file, with `outputs` as folder of runs."""
    check_targets({"x": settings}, (), [Path("outputs")])


@pytest.mark.parametrize("name", FILENAMES)
def test_a_checkpoint_s_name_names_metrics_and_nothing_else(name):
    settings = {"_target_": CHECKPOINT, "dirpath": "outputs/c", "filename": FILENAMES[name]}
    with pytest.raises(UserError, match=r"x\.filename"):
        check_part(settings)


def test_a_checkpoint_s_name_may_hold_metrics():
    filename = "{epoch}-{val/loss:.2f}-{step:06d}-{step:,}-{acc:.3%}"
    check_part({"_target_": CHECKPOINT, "dirpath": "outputs/c", "filename": filename})


@SOAK
def test_a_whole_file_with_such_a_name_is_refused():
    name = FILENAMES["a variable of the environment"]
    settings = {"_target_": CHECKPOINT, "dirpath": "${output}/c", "filename": name}
    assert "callbacks.x.filename" in said_of({"callbacks": {"x": settings}})


LOGGERS = [
    (TENSORBOARD, "name", "$FLATOUT_HOSTILE"),
    (TENSORBOARD, "version", "x$FLATOUT_HOSTILE"),
    (TENSORBOARD, "sub_dir", "$FLATOUT_HOSTILE"),
    (TENSORBOARD, "save_dir", "outputs/$FLATOUT_HOSTILE"),
    (TENSORBOARD, "version", ["/../../../../../outside/x"]),
    (TENSORBOARD, "version", {"/../../../../../outside/x": 1}),
    (CSV, "version", ["/../../../../../outside/x"]),
]


@pytest.mark.parametrize(("kind", "key", "value"), LOGGERS)
def test_a_logger_s_folder_has_no_variable_and_no_list_in_its_name(kind, key, value):
    with pytest.raises(UserError, match=rf"x\.{key}"):
        check_part({"_target_": kind, "save_dir": "outputs/log", key: value})


FUNCTIONS = [
    ("lightning.pytorch.callbacks.BackboneFinetuning", "lambda_func"),
    ("lightning.pytorch.callbacks.ThroughputMonitor", "batch_size_fn"),
    ("lightning.pytorch.callbacks.ThroughputMonitor", "length_fn"),
    ("lightning.pytorch.callbacks.WeightAveraging", "avg_fn"),
]


@pytest.mark.parametrize(("kind", "key"), FUNCTIONS)
def test_a_text_where_a_function_is_wanted_is_refused(kind, key):
    with pytest.raises(UserError, match=rf"x\.{key}.*a function or an object is wanted"):
        check_part({"_target_": kind, key: "max"})


OTHER_TYPES = [
    ("lightning.pytorch.callbacks.EarlyStopping", {"monitor": "val/loss", "patience": "x"}),
    (CHECKPOINT, {"dirpath": "outputs/c", "train_time_interval": 5}),
    (CHECKPOINT, {"dirpath": "outputs/c", "save_top_k": [1]}),
]


@pytest.mark.parametrize(("kind", "arguments"), OTHER_TYPES)
def test_an_argument_of_another_type_than_its_class_wants_is_refused(kind, arguments):
    with pytest.raises(UserError, match=r"is wanted there"):
        check_part({"_target_": kind, **arguments})


def test_arguments_of_the_types_that_are_wanted_stay():
    kind = "lightning.pytorch.callbacks.EarlyStopping"
    check_part({"_target_": kind, "monitor": "val/loss", "patience": 3, "stopping_threshold": 1})
    check_part({"_target_": kind, "monitor": "val/loss", "strict": False, "mode": "max"})


def test_a_layer_may_stand_where_a_function_is_wanted():
    distance = {"_target_": "torch.nn.PairwiseDistance"}
    loss = "torch.nn.TripletMarginWithDistanceLoss"
    check_part({"_target_": loss, "distance_function": distance})
    check_part({"_target_": loss, "distance_function": None})


ODD_ARGUMENTS = [("_args_", "/x"), ("_args_", {"/x": 1}), ("_convert_", "x"), ("_recursive_", "x")]


@pytest.mark.parametrize(("key", "value"), ODD_ARGUMENTS)
def test_arguments_by_place_are_a_list_and_no_text_of_letters(key, value):
    with pytest.raises(UserError, match=rf"x\.{key}"):
        check_part({"_target_": CSV, key: value})


LINKED: dict[str, tuple[str, dict[str, Any]]] = {
    "a logger's name": ("linked", {"_target_": TENSORBOARD, "name": "linked"}),
    "the usual name": ("lightning_logs", {"_target_": CSV}),
    "a version": ("lightning_logs/version_3", {"_target_": CSV, "version": 3}),
    "a version without a name": ("version_3", {"_target_": CSV, "name": "", "version": 3}),
    "a checkpoint's name": ("linked", {"_target_": CHECKPOINT, "filename": "linked/x"}),
}


@pytest.mark.parametrize("name", LINKED)
def test_a_logger_and_a_checkpoint_in_a_file_follow_no_link(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    link, settings = LINKED[name]
    place = tmp_path / "outputs" / "log" / link
    place.parent.mkdir(parents=True)
    place.symlink_to(tmp_path)
    folder = "dirpath" if settings["_target_"] == CHECKPOINT else "save_dir"
    with pytest.raises(UserError, match=r"lies outside of the folder of all runs|leads out"):
        check_part({**settings, folder: "outputs/log"})


def test_a_logger_writes_where_the_folder_of_runs_is_a_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "disk" / "log" / "lightning_logs").mkdir(parents=True)
    (tmp_path / "outputs").symlink_to(tmp_path / "disk")
    check_part({"_target_": CSV, "save_dir": "outputs/log", "version": 1.5, "_convert_": "ALL"})


def test_a_link_among_the_files_leads_no_run_outside(tmp_path, monkeypatch, capsys):
    work = tmp_path / "work"
    work.mkdir()
    (work / "linked").symlink_to(tmp_path)
    monkeypatch.chdir(work)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "evil.yaml").write_text("# @package _global_\noutput: linked/x\n")
    assert run_train([f"--config-dir={tmp_path}", "+experiment=evil"], monkeypatch) == 2
    assert "output: 'linked/x' lies outside" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


FOLDERS = [
    "output: outputs/bert\n",
    pytest.param("hydra: {sweep: {dir: '${output}'}}\n", marks=SOAK),
]


@pytest.mark.parametrize("text", FOLDERS)
def test_a_file_names_folders_below_a_folder_of_runs_that_is_a_link(text, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "outputs").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")
    words = [f"--config-dir={tmp_path}", "+experiment=mine", "--cfg=job"]
    assert run_train(words, monkeypatch) == 0


def _plant_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def _plant_second_name(path: Path, outside: Path) -> None:
    os.link(outside, path)


def _plant_pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


PLANTED = {
    "a link": (_plant_link, "is a link that leads out"),
    "a second name": (_plant_second_name, "has another name, too"),
    "a pipe": (_plant_pipe, "is a pipe or a device"),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize(
    ("key", "file"), [("run", "train.log"), ("sweep", "multirun.yaml")], ids=["run", "sweep"]
)
def test_a_folder_of_a_file_holds_nothing_that_lies_elsewhere(
    name, key, file, tmp_path, monkeypatch, capsys
):
    plant, said = PLANTED[name]
    outside = tmp_path / "mine.txt"
    outside.write_text("mine")
    (tmp_path / "work" / "outputs" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    plant(Path("outputs", "x", file), outside)
    (tmp_path / "experiment").mkdir()
    text = f"# @package _global_\nhydra: {{{key}: {{dir: outputs/x}}}}\n"
    (tmp_path / "experiment" / "evil.yaml").write_text(text)
    words = [f"--config-dir={tmp_path}", "+experiment=evil"]
    assert run_train([*words, *(["-m", "seed=1,2"] if key == "sweep" else [])], monkeypatch) == 2
    assert said in capsys.readouterr().err
    assert outside.read_text() == "mine"


def test_a_folder_whose_name_holds_the_mode_is_looked_at_with_the_mode_it_has(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "work" / "outputs").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("outputs", "xRunMode.RUN").symlink_to(tmp_path / "mine")
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nhydra: {run: {dir: 'outputs/x${hydra.mode}'}, output_subdir: hy}\n"
    (tmp_path / "experiment" / "evil.yaml").write_text(text)
    assert run_train([f"--config-dir={tmp_path}", "+experiment=evil"], monkeypatch) == 2
    assert "lies outside" in capsys.readouterr().err
    assert not list((tmp_path / "mine").iterdir())


def test_the_time_in_a_folder_s_name_is_asked_for_once():
    cfg = OmegaConf.create(
        {
            "name": "x",
            "output": "outputs",
            "hydra": {
                "run": {"dir": "outputs/${now:%f}"},
                "sweep": {"dir": "outputs/m", "subdir": "0"},
                "job": {"name": "train", "num": "???", "id": "???"},
                "output_subdir": None,
                "launcher": {"_target_": LauncherSettings._target_},
            },
        }
    )
    asked = iter(["outputs/1", "outputs/2"])
    OmegaConf.register_new_resolver("now", lambda form: next(asked), use_cache=True, replace=True)
    try:
        cfg.hydra.run.dir = "${now:%f}"
        check_folders(cfg, [], is_trial=False)
        assert cfg.hydra.run.dir == "outputs/1"
    finally:
        setup_globals()


def test_a_launcher_that_unpickles_results_is_typed_and_finds_none_of_others(tmp_path):
    cfg = OmegaConf.create({"hydra": {"launcher": {"_target_": "theirs.Launcher"}}})
    with pytest.raises(UserError, match=r"theirs\.Launcher stands in a file"):
        _require_plain_launcher(cfg, tmp_path / "new", [])
    typed = ["hydra/launcher=theirs"]
    _require_plain_launcher(cfg, tmp_path / "new", typed)
    with pytest.raises(UserError, match="unpickles results"):
        _require_plain_launcher(cfg, tmp_path, typed)
    _require_plain_launcher(cfg, tmp_path, [*typed, f"hydra.sweep.dir={tmp_path}"])
    cfg.hydra.launcher._target_ = LauncherSettings._target_
    _require_plain_launcher(cfg, tmp_path, [])


OF_ENVIRONMENT = "${oc.env:FLATOUT_HOSTILE}"
SHOWN: dict[str, dict[str, Any]] = {
    "Hydra's own files": {"output_subdir": OF_ENVIRONMENT},
    "what Hydra chose": {"runtime": {"choices": {"x": OF_ENVIRONMENT}}},
    "variables for Hydra": {"env": {"a": OF_ENVIRONMENT}},
    "a callback of Hydra": {"callbacks": {"a": {"_target_": OF_ENVIRONMENT}}},
    "a launcher": {"launcher": {"_target_": OF_ENVIRONMENT}},
}


@pytest.mark.parametrize("name", SHOWN)
def test_no_setting_of_hydra_in_a_file_asks_the_environment(name):
    with pytest.raises(UserError, match="not to the environment"):
        check_values_of_hydra(SHOWN[name], [], [])


@SOAK
@pytest.mark.parametrize("name", SHOWN)
def test_the_same_in_a_whole_file_shows_no_secret(name):
    said_of({"hydra": SHOWN[name]})


@pytest.mark.parametrize("key", ["name", pytest.param("output", marks=SOAK)])
def test_a_refusal_of_a_folder_shows_no_secret(key, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLATOUT_HOSTILE", SECRET)
    (tmp_path / "experiment").mkdir()
    text = f"# @package _global_\n{key}: '../{OF_ENVIRONMENT}'\n"
    (tmp_path / "experiment" / "evil.yaml").write_text(text)
    assert run_train([f"--config-dir={tmp_path}", "+experiment=evil"], monkeypatch) == 2
    said = capsys.readouterr().err
    assert key in said
    assert SECRET not in said


_PATH = "!!python/object/apply:pathlib.Path"
EARLY = {
    "an option by an escaped sign": 'defaults: [override /data: "\\x24{oc.env:HOME}"]\n',
    "a file by a folded sign": 'defaults:\n- "$\\\n  {oc.env:HOME}"\n',
    "a search path": "hydra: {searchpath: ['file:///x/${oc.env:HOME}']}\n",
    "a search path by another setting": "hydra: {searchpath: ['${zz}']}\n",
    "a variable to copy": "hydra: {job: {env_copy: ['${oc.env:HOME}']}}\n",
    "a variable to copy, in a file of its group": "env_copy: ['${oc.env:HOME}']\n",
    "beside what looks like a date": "{zz: 2024-13-45, env_copy: ['${oc.env:HOME}']}\n",
    "beside a tag": f"zz: {_PATH} [a]\nenv_copy: ['${{oc.env:HOME}}']\n",
    "by a tag": f"env_copy: [{_PATH} ['${{oc.env:HOME}}']]\n",
}


@pytest.mark.parametrize("name", EARLY)
def test_what_hydra_reads_while_it_composes_asks_no_environment(name):
    with pytest.raises(UserError, match=r"evil\.yaml: "):
        check_read_early(EARLY[name], "evil.yaml")


def test_a_search_path_shows_no_secret_of_the_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLATOUT_HOSTILE", SECRET)
    path = f"file:///nowhere/{OF_ENVIRONMENT}"
    settings = {"defaults": ["train", "_self_"], "hydra": {"searchpath": [path]}}
    (tmp_path / "evil.yaml").write_text(yaml.safe_dump(settings))
    words = [f"--config-dir={tmp_path}", "--config-name=evil", "seed=no_number"]
    assert run_train(words, monkeypatch) == 2
    said = "".join(capsys.readouterr())
    assert "hydra.searchpath[0]" in said
    assert SECRET not in said


def test_a_typed_reference_that_does_not_fit_shows_no_secret(monkeypatch, capsys):
    monkeypatch.setenv("FLATOUT_HOSTILE", f"{SECRET}\nof two lines")
    assert run_train([f"seed={OF_ENVIRONMENT}"], monkeypatch) == 2
    said = capsys.readouterr().err
    assert "seed: the value referred to does not fit (a whole number)" in said
    assert SECRET not in said


@dataclass
class _Typed:
    count: int = 1
    share: float = 0.5
    is_on: bool = True
    kind: OptimizerName = OptimizerName.adamw


@pytest.mark.parametrize("key", ["count", "share", "is_on", "kind"])
def test_no_reason_of_omegaconf_quotes_a_value_referred_to(key, monkeypatch):
    monkeypatch.setenv("FLATOUT_HOSTILE", SECRET)
    settings = OmegaConf.structured(_Typed)
    settings[key] = OF_ENVIRONMENT
    with pytest.raises(InterpolationValidationError, match=SECRET) as caught:
        OmegaConf.resolve(settings)
    assert "does not fit" in without_value(str(caught.value))
    assert SECRET not in without_value(str(caught.value))


def test_a_reference_that_leads_nowhere_is_named():
    for reference in ("${oc.env:FLATOUT_NOWHERE}", "${data.FLATOUT_NOWHERE}"):
        with pytest.raises(OmegaConfBaseException) as caught:
            OmegaConf.resolve(OmegaConf.create({"seed": reference}))
        assert "FLATOUT_NOWHERE' not found" in without_value(str(caught.value))


TYPED = {
    "the word": (f"data.encoding.secret={SECRET}", "${hydra.overrides.task[0]}"),
    "all words": (f"data.encoding.secret={SECRET}", "${hydra.overrides.task}"),
    "the address": (f"data.source=s3://KEY:{SECRET}@bucket", "${data.source}"),
    "a mapping above it": (f"data.source=s3://KEY:{SECRET}@bucket", "${data}"),
    "a setting of one's own": (f"+task.api_key={SECRET}", "${task.api_key}"),
    "a number": ("+task.api_key=12345678", "${task.api_key}"),
    "an item of a list": (f"+task.token=[{SECRET}]", "${task.token[0]}"),
    "a part of a mapping": (f"+task.credentials={{word: {SECRET}}}", "${task.credentials.word}"),
    "a variable for Hydra": (f"hydra.job.env_set.api_key={SECRET}", "${hydra.job.env_set.api_key}"),
}


@pytest.mark.parametrize("name", TYPED)
def test_a_file_refers_to_no_secret_that_was_typed(name):
    word, reference = TYPED[name]
    key, _, value = word.lstrip("+").partition("=")
    settings: dict[str, Any] = {}
    group = settings
    *above, last = key.split(".")
    for part in above:
        group = group.setdefault(part, {})
    group[last] = yaml.safe_load(value)
    secrets = secret_keys(settings, [word])
    with pytest.raises(UserError, match="may be secret"):
        check_values_of_hydra({"run": {"dir": f"${{output}}/{reference}"}}, [word], secrets)
    with pytest.raises(UserError, match="may be secret"):
        check_values(settings | {"logger": {"csv": {"folder": reference}}}, [word])


def test_a_file_refers_to_no_variable_that_hydra_copied():
    copied = {"env_copy": ["WANDB_API_KEY"], "env_set": {"WANDB_API_KEY": SECRET}}
    folder = {"dir": "${output}/${hydra.job.env_set.WANDB_API_KEY}"}
    words = ["hydra.job.env_copy=[WANDB_API_KEY]"]
    with pytest.raises(UserError, match="may be secret"):
        check_values_of_hydra({"job": copied, "run": folder}, words, [])


@pytest.mark.parametrize("group", ["params", "space"])
def test_a_sweep_in_a_file_searches_no_folder_of_runs(group):
    with pytest.raises(UserError, match="searches what only the command line may set"):
        check_values_of_hydra({"sweeper": {group: {"output": "choice(../outside)"}}}, [], [])


@SOAK
def test_a_run_in_a_file_lies_below_the_folder_of_runs_and_not_beside_it():
    assert "is the folder of all runs" in said_of({"hydra": {"run": {"dir": "${output}"}}})


@SOAK
@pytest.mark.parametrize("text", ["hydra: [1]\n", "data: {source: '~nosuchuser/x.csv'}\n"])
def test_odd_values_in_a_file_end_in_one_sentence(text):
    said_of(text)


@pytest.mark.parametrize("name", ["~nosuchuser/x.csv", f"{'a' * 5000}.csv"])
def test_a_source_that_no_folder_can_hold_is_no_file(name):
    with pytest.raises(UserError, match=r"no such file|cannot read"):
        open_splits(name, {}, ReadingConfig())


def test_a_pattern_through_a_folder_that_cannot_be_listed_is_refused(monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("Invalid argument")

    monkeypatch.setattr(Path, "glob", fail)
    with pytest.raises(UserError, match="cannot be followed"):
        open_source("/proc/**/*.csv", where="data.source")


def test_an_encoding_with_a_null_character_is_refused():
    with pytest.raises(UserError, match="no encoding"):
        ReadingConfig(encoding="a\0b")


def test_a_folder_of_settings_of_others_ends_help_in_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.yaml").write_text("a: 1\n")
    os.mkfifo(tmp_path / "pipe.yaml")
    monkeypatch.setenv("FLATOUT_CONF", str(tmp_path))
    assert checksum_of(tmp_path)  # a pipe is not waited for
    assert run_train(["seed=1"], monkeypatch) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["to_dict", "__class__", "sub_configs"])
def test_a_setting_of_an_encoder_is_no_method_and_no_name_of_python(name):
    described = TransformerConfig().read_description()
    assert not _set_one(described, name, "x")
    assert _set_one(described, "hidden_size", 8)


NAMED_LIKE_SETTINGS = {
    "data.source": 'data: {source: "s3://b/${oc.env:FLATOUT_HOSTILE}?endpoint_override=127.0.0.1"}',
    "output": "output: /tmp/elsewhere",
    "allow_targets": "allow_targets: [evil]",
}


@pytest.mark.parametrize("group", NAMED_LIKE_SETTINGS)
def test_a_folder_that_is_named_like_a_setting_does_not_make_its_files_typed(group):
    files = {f"{group}/evil.yaml": f"# @package _global_\n{NAMED_LIKE_SETTINGS[group]}"}
    found = hostile.tried(Case("evil", (f"+{group}=evil",), files, ENVIRONMENT, is_whole=True))
    assert found.is_refused, found.said
    assert "a folder of files is named like a setting" in found.said


def test_every_setting_that_is_no_group_is_known_as_one():
    groups = {folder.name for folder in Path("conf").iterdir() if folder.is_dir()}
    settings = {each.name for each in fields(RunConfig)} - groups
    assert all(map(is_named_like_a_setting, settings))
    assert not any(map(is_named_like_a_setting, groups))


FOLDERS_WITH_SIGNS = [
    {"name": "n$FLATOUT_HOSTILE"},
    {"name": "mydb?x"},
    {"hydra": {"run": {"dir": "${output}/$FLATOUT_HOSTILE"}}},
    {"hydra": {"sweep": {"subdir": "$FLATOUT_HOSTILE"}}},
]


@pytest.mark.parametrize("settings", FOLDERS_WITH_SIGNS, ids=str)
def test_a_folder_in_a_file_has_no_sign_that_a_library_takes_for_more_than_a_name(settings):
    assert "a folder without $, %, ? and #" in said_of(settings)


@pytest.mark.parametrize("output", ["o$FLATOUT_HOSTILE", "mydb?x"])
def test_the_same_holds_for_the_folder_of_runs(output, tmp_path, monkeypatch, capsys):
    (tmp_path / "experiment").mkdir()
    text = f"# @package _global_\noutput: {output}\n"
    (tmp_path / "experiment" / "evil.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert run_train(["--config-dir", str(tmp_path), "+experiment=evil"], monkeypatch) == 2
    assert capsys.readouterr().err.startswith(f"output: {output!r} (a folder without")
    assert [path.name for path in tmp_path.iterdir()] == ["experiment"]


@pytest.mark.parametrize(("key", "value"), [("validate", False), ("style", "{")])
def test_a_form_of_messages_in_a_file_is_checked_and_looks_into_nothing(key, value):
    form = {"format": "%(nope)s" if key == "validate" else "{msg.__class__}", key: value}
    handler = {"class": "logging.StreamHandler", "formatter": "s"}
    logging = {"version": 1, "formatters": {"s": form}, "handlers": {"c": handler}}
    assert f"formatters.s.{key}: {value!r}" in said_of({"hydra": {"job_logging": logging}})


@pytest.mark.parametrize("place", ["pkg://evil", "structured://evil", "Structured://evil"])
def test_a_place_of_settings_is_a_folder_and_no_module_to_import(place):
    for written in (place, f"['file:///a', '{place}']"):
        with pytest.raises(UserError, match="names a package"):
            require_folders("hydra.searchpath", written)


def test_folders_of_settings_may_be_anywhere():
    require_folders("hydra.searchpath", "['file:///a/b', 'conf', '/c', None, '/run at 12:30/d:e']")
    refuse_forbidden_options(["--config-path=/my/conf", "data.source=s3://b/x.csv"])
    with pytest.raises(UserError, match="names a package"):
        refuse_forbidden_options(["--config-path", "structured://evil"])


def test_lists_of_defaults_that_name_the_next_one_twice_are_ended_by_their_number(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "experiment").mkdir()
    for number in range(22):
        next_one = f"b{number + 1}"
        text = f"defaults: [{next_one}@x{number}, {next_one}@y{number}]\n"
        (tmp_path / "experiment" / f"b{number}.yaml").write_text(text)
    (tmp_path / "experiment" / "b22.yaml").write_text("a: 1\n")
    words = [f"--config-dir={tmp_path}", "+experiment=b0"]
    assert run_train(words, monkeypatch) == 2
    assert capsys.readouterr().err.startswith("conf: lists of defaults name files without end")


def test_a_launcher_in_a_file_that_would_keep_typed_secrets_is_refused():
    words = ["seed=1,2", f"data.validation=https://me:{SECRET}@x.invalid/y.csv"]
    cfg = OmegaConf.create({"hydra": {"launcher": {"_target_": "theirs.Launcher"}}})
    with pytest.raises(UserError, match=r"theirs\.Launcher in a file would keep your secrets"):
        _require_no_secret_in_clear(cfg, words)
    _require_no_secret_in_clear(cfg, ["hydra/launcher=theirs", *words])
    _require_no_secret_in_clear(cfg, words[:1])


@pytest.mark.parametrize(
    "part", [{"verbose": True}, {"hydra_logging": {"root": {"level": "DEBUG"}}}]
)
def test_logging_of_a_file_that_would_show_typed_secrets_is_refused(part):
    word = f"data.validation=https://me:{SECRET}@x.invalid/y.csv"
    launcher = {"launcher": {"_target_": LauncherSettings._target_}}
    cfg = OmegaConf.create({"hydra": {**launcher, **part}})
    with pytest.raises(UserError, match="logging in a file would show your secrets"):
        _require_no_secret_in_clear(cfg, [word])
    typed = ["hydra.verbose=true", "hydra/hydra_logging=theirs", word]
    _require_no_secret_in_clear(cfg, typed)
    _require_no_secret_in_clear(OmegaConf.create({"hydra": launcher}), [word])


def test_a_sweep_in_a_file_is_counted_before_it_is_listed():
    for params in (
        {"seed": "range(1,1000000000)"},
        {f"callbacks.a{number}": "1,2,3,4,5,6,7,8" for number in range(9)},
    ):
        with pytest.raises(UserError, match=r"hydra\.sweeper\.params: [\d,]+ trials"):
            _check_list_of_trials({"params": params})
    few = {"seed": "range(1,1000)", "model": "bilstm,textcnn", "name": "x"}
    _check_list_of_trials({"params": few, "max_batch_size": 2})
    for odd in ({"params": {"seed": "range(0,10,0)"}}, {"max_batch_size": -1}):
        with pytest.raises(UserError, match=r"hydra\.sweeper"):
            _check_list_of_trials(odd)


def test_a_message_that_quotes_a_long_value_is_read_to_a_bound():
    assert "seed" in said_of({"seed": "override " * 100_000})
    assert "seed" in said_of({"seed": "expected one of [" * 50_000})


def test_references_that_double_are_refused_before_they_are_followed():
    doubling = {f"a{number}": f"${{callbacks.a{number + 1}}}" * 2 for number in range(40)}
    said = said_of({"callbacks": {**doubling, "a40": "x"}})
    assert "unfold to too long a text" in said


def _doubling(reference: str) -> dict[str, object]:
    """Forty values, each of which refers twice to the next."""
    values = {f"a{number}": reference.format(number + 1) * 2 for number in range(40)}
    return {**values, "a40": "x"}


DOUBLING = {
    "in brackets": {"trainer": _doubling("${{[trainer][a{}]}}")},
    "by another name": {"callbacks": "${trainer}", "trainer": _doubling("${{callbacks.a{}}}")},
    "as mappings": {
        **{f"a{number}": dict.fromkeys("xy", f"${{a{number + 1}}}") for number in range(24)},
        "a24": {"z": 1},
    },
    "as lists": {**{f"a{number}": [f"${{a{number + 1}}}"] * 2 for number in range(24)}, "a24": [1]},
}


@pytest.mark.parametrize("name", DOUBLING)
def test_references_double_in_many_ways(name):
    with pytest.raises(UserError, match="unfold to too long a text"):
        check_growth(DOUBLING[name])


def test_references_are_followed_to_their_end():
    check_growth({"a": {"b": "${.c}${..e}", "c": "x" * 600_000}, "d": "${a.c}", "e": "y"})
    with pytest.raises(UserError, match="unfold"):
        check_growth({"a": {"b": "${.c}${..d}", "c": "x" * 600_000}, "d": "${a.c}"})
    check_growth({"a": "${b}", "b": "${a}"})


SLOW = [
    "seed: " + "1:" + "59:" * 300 + "59",
    "name: ${a" + ".a" * 1000 + "}",
    "b: " + "${a}" * 2000,
]


@pytest.mark.parametrize("text", SLOW, ids=["base sixty", "a long name", "many references"])
def test_texts_that_take_long_to_read_are_refused_unread(text):
    with pytest.raises(UserError, match="more than"):
        require_modest(text, "evil.yaml")


@pytest.mark.parametrize("key", ["model.pretrained", "data.tokenizer", "data.exclude"])
@pytest.mark.parametrize("name", ["a\0b", "a" * 5000], ids=["null", "long"])
def test_a_name_that_no_disk_takes_ends_in_one_sentence(key, name):
    said_of(
        {"model": {"pretrained": name}} if key == "model.pretrained" else {"data": {key[5:]: name}},
        "model=transformer",
    )


def test_a_file_takes_no_run_into_its_folder_from_where_python_would_import():
    assert said_of({"hydra": {"job": {"chdir": True}}}).startswith("hydra.job.chdir: stands in")


def test_a_chain_of_file_systems_is_an_address():
    assert "an address stands in a file" in said_of({"name": "dir::x"})


def test_a_folder_with_a_part_behind_a_colon_is_no_name_of_the_hub(tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="conf is a folder or a file here"):
        from_hub("conf:evil", "data.source")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("adapter_config.json", '{"megatron_core": "megatron.evil"}', "holds an adapter of peft"),
        (
            "config.json",
            '{"model_type": "llava", "vision_config": {"backbone": "of/others"}}',
            "names a backbone to fetch",
        ),
        ("config.json", '{"model_type": "timm_wrapper"}', "names a backbone to fetch"),
        ("config.json", '{"model_type": "detr", "zz": ' + "9" * 400 + "}", "400 digits"),
    ],
)
def test_a_folder_of_an_encoder_that_names_more_to_load_is_refused(file, content, said, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=said):
        TransformerConfig(pretrained=str(tmp_path)).read_description()


def test_a_model_s_folder_here_is_opened_without_asking_for_any_server(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *words, **named: asked.append(words))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert TransformerConfig(pretrained=str(tmp_path)).read_description().model_type == "bert"
    assert asked == []
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("name", ["csv:default", "text", "json:x"])
def test_a_form_of_files_is_no_name_of_the_hub(name):
    with pytest.raises(UserError, match="is a form of files"):
        from_hub(name, "data.source")


def test_a_file_that_is_missing_is_no_form_of_files():
    with pytest.raises(UserError, match="no file or folder rows"):
        from_hub("rows.v2", "data.source")
