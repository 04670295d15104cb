"""Check Hydra's own settings before Hydra acts on them, when it runs a job or a sweep.

Hydra calls what its callbacks, launcher, sweeper and logging name, and a file may set all of these.
So `check_hydra` looks at all settings as they are composed: at parts that name classes, commands of
a cluster, values that only the command line may set, and at secrets that Hydra would write down.
Folders are checked in `hydra_folders.py`. Open this file when Hydra acts on one more setting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, RangeSweep
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flatout.cli.hydra_folders import check_folders
from flatout.cli.targets import is_allowed, targets, trust_package
from flatout.cli.typed import (
    ONLY_TYPED,
    allowed_targets,
    check_growth,
    check_values,
    check_values_of_hydra,
    is_set_by_words,
    is_typed_value,
    may_hold_secrets,
    nodes,
    refuse_references,
    secret_keys,
    select_value,
    words_as_entered,
)
from flatout.errors import require
from flatout.sweep.settings import LauncherSettings

# classes and texts that settings of Python's logging may name
_LOGGING_CLASSES = (
    "logging.StreamHandler",
    "logging.FileHandler",
    "logging.NullHandler",
    "logging.Formatter",
)
_LOGGING_TEXTS = (
    "ext://sys.stdout",
    "ext://sys.stderr",
    "${hydra.runtime.output_dir}/${hydra.job.name}.log",
)
_MOST_TRIALS = 100_000  # of a sweep that a file lists
_PLUGINS = ("hydra.callbacks", "hydra.launcher", "hydra.sweeper")  # Hydra makes them
_LEVELS_OF_ALL = ("DEBUG", "NOTSET", "0", "10")
# settings of logging.Formatter, and the only value that a file may give each
_FORMATTER_VALUES = {"style": "%", "validate": True}


def check_hydra(cfg: DictConfig, overrides: Sequence[str], *, is_trial: bool) -> None:
    """Refuse settings of Hydra that execute code, or write elsewhere, before a run begins.

    `overrides` are the words that were typed. `is_trial`: whether this is a trial of a sweep that
    has begun, whose folder holds what the sweep itself has written.
    """
    settings = cfg.hydra
    for kind in ("task", "hydra"):
        words = words_as_entered(settings.overrides[kind])
        invented = [word for word in words if word not in overrides]
        require(
            not invented,
            f"hydra.overrides.{kind}",
            f"{invented} was not typed",
            hint="Take it out of the file.",
        )
    plain: Any = OmegaConf.to_container(settings, resolve=False)
    # before anything is resolved: a refusal quotes values, and files may refer to secrets
    composed: Any = OmegaConf.to_container(cfg, resolve=False)
    check_growth(composed)
    del composed["hydra"]
    check_values_of_hydra(plain, overrides, secret_keys(composed, overrides))
    check_values(composed, overrides)
    _check_plugins(cfg, overrides)
    if str(plain["sweeper"].get("_target_")).endswith(".BasicSweeper"):  # others search a space
        _check_list_of_trials(plain["sweeper"])
    # submitit runs these in a shell
    for name in ("setup", "additional_parameters", "srun_args", "python"):
        _require_typed_parts(f"hydra.launcher.{name}", plain["launcher"].get(name), overrides)
    # Hydra counts trials itself, behind what is checked here
    for name in ("num", "id"):
        is_counted = OmegaConf.is_missing(settings.job, name)
        key = f"hydra.job.{name}"
        require(
            is_counted or is_set_by_words(key, overrides), key, "stands in a file", hint=ONLY_TYPED
        )
    # Python imports from the folder that it is in, and files may bring one along
    _require_typed_parts("hydra.job.chdir", plain["job"]["chdir"], overrides)
    # Hydra has put the variables of `env_copy` into `env_set`.
    copied = plain["job"]["env_copy"] if is_set_by_words("hydra.job.env_copy", overrides) else []
    env = {name: value for name, value in plain["job"]["env_set"].items() if name not in copied}
    _require_typed_parts("hydra.job.env_set", env, overrides)
    # Hydra fills it when a run begins; a log that is opened before would go where a file says.
    folder = "hydra.runtime.output_dir"
    if not OmegaConf.is_missing(settings.runtime, "output_dir"):
        _require_typed_parts(folder, plain["runtime"]["output_dir"], overrides)
    for name in ("hydra_logging", "job_logging"):
        _check_logging(plain[name], f"hydra.{name}")
    check_folders(cfg, overrides, is_trial=is_trial)
    _require_no_secret_in_clear(cfg, overrides)


def _check_list_of_trials(sweeper: Mapping[str, Any]) -> None:
    """Refuse a sweep of a file with more trials than a list holds: Hydra lists all first."""
    size = sweeper.get("max_batch_size")
    is_size = size is None or (isinstance(size, int) and size >= 1)
    require(is_size, "hydra.sweeper.max_batch_size", repr(size), allowed="1 or more, or null")
    words = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    trials = 1.0
    for override in OverridesParser.create().parse_overrides(words):
        values = override.value()
        if isinstance(values, RangeSweep):
            key = f"hydra.sweeper.params.{override.get_key_element()}"
            require(values.step != 0, key, "a range of steps of 0", allowed="another step")
            trials *= abs(float(values.stop or 0) - float(values.start or 0)) / abs(values.step)
        elif isinstance(values, ChoiceSweep):
            trials *= len(values.list)
    few = trials <= _MOST_TRIALS
    require(
        few, "hydra.sweeper.params", f"{trials:,.0f} trials", allowed=f"at most {_MOST_TRIALS:,}"
    )


def _check_plugins(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse a launcher, a sweeper or a callback of a package that is not trusted."""
    allowed = allowed_targets(cfg, overrides)
    plain: Any = OmegaConf.to_container(cfg.hydra, resolve=False)
    for key, value in nodes(plain, "hydra"):
        _require_no_part_elsewhere(cfg, key, value)
    for key in ("launcher", "sweeper", "callbacks", "job.env_set"):
        parts = [select_value(cfg, f"hydra.{key}")]
        if key == "callbacks" and OmegaConf.is_dict(parts[0]):
            parts = [select_value(cfg, f"hydra.callbacks.{name}") for name in parts[0]]
        is_fitting = all(map(OmegaConf.is_dict, parts))
        require(is_fitting, f"hydra.{key}", "does not fit", allowed="a mapping")
    for group in ("launcher", "sweeper", "callbacks"):
        for where, described in targets(_resolved(cfg, f"hydra.{group}"), f"hydra.{group}"):
            target = described["_target_"]
            if group != "callbacks" and where == f"hydra.{group}":
                is_typed = is_set_by_words(f"hydra/{group}", overrides)
                _require_plugin(cfg.hydra._get_node(group), target, where, is_typed=is_typed)
                continue
            require(
                is_allowed(target, allowed),
                where,
                f"_target_ {target!r} is from a package not trusted",
                hint=trust_package(str(target)),
            )


def _require_no_part_elsewhere(cfg: DictConfig, key: str, value: object) -> None:
    """Refuse settings by which a class could stand where it is not compared with the list.

    Hydra makes its callbacks, launcher and sweeper of what they refer to, when a run begins. By
    then a reference may lead to more than it does now.
    """
    is_plugin = key.startswith(_PLUGINS)
    has_class = isinstance(value, Mapping) and "_target_" in value
    require(is_plugin or not has_class, key, "names a class", hint="Leave it out.")
    refers = isinstance(value, str) and "${" in value
    if is_plugin and refers:
        is_whole = OmegaConf.is_config(select_value(cfg, key))
        is_callback = key.startswith("hydra.callbacks")
        require(
            not (is_whole or is_callback),
            key,
            f"{value!r} refers to other settings",
            hint="Write the value itself.",
        )


def _require_plugin(node: object, target: object, where: str, *, is_typed: bool) -> None:
    """Refuse a `_target_` of a launcher or sweeper that is no plugin, or not that of its settings.

    Hydra would call one plugin with the settings of another. `is_typed`: whether it was chosen on
    the command line. A file can take the settings of ours away, by null, and write others there.
    """
    kind = OmegaConf.get_type(node)
    if is_dataclass(kind):
        defaults = {field.name: field.default for field in fields(kind)}
        is_plugin = target == defaults.get("_target_")
    else:
        is_plugin = is_typed and target in Plugins.instance().class_name_to_class
    require(
        is_plugin,
        where,
        f"_target_ {target!r} is not the class of these settings",
        hint=f"Leave it out, and choose by hydra/{where.rpartition('.')[2]}=NAME.",
    )


def _require_typed_parts(key: str, value: object, overrides: Sequence[str]) -> None:
    """Refuse a value of which any part stands in a file: Hydra merges a file's mapping and yours.

    With `hydra.job.env_set.A=1` typed, a file may still not set B.
    """
    parts = value.items() if isinstance(value, Mapping) else ()
    is_typed = all(is_typed_value(f"{key}.{name}", str(part), overrides) for name, part in parts)
    if not isinstance(value, Mapping):
        is_typed = not value or is_set_by_words(key, overrides)
    require(is_typed, key, "stands in a file", hint=ONLY_TYPED)


def _check_logging(settings: object, name: str) -> None:
    """Refuse calls: Python's logging calls a `class`, a `()`, and any name behind `ext://`.

    Refuse forms, too, that are not compared with what a message has, or could look into objects.
    """
    for where, value in nodes(settings, name):
        if isinstance(value, str):
            is_plain = value in _LOGGING_TEXTS or not re.search(r"\$\{|\w+://", value)
            require(is_plain, where, f"{value!r} is a reference", hint="Write the value itself.")
        for key, item in value.items() if isinstance(value, dict) else ():
            is_call = key in ("()", ".") and item != "colorlog.ColoredFormatter"
            require(not is_call, where, f"{key!r} calls {item!r}", hint="Logging may call nothing.")
            is_class = key == "class" and item not in _LOGGING_CLASSES
            require(
                not is_class, f"{where}.class", f"{item!r}", allowed=", ".join(_LOGGING_CLASSES)
            )
            is_plain_form = key not in _FORMATTER_VALUES or item == _FORMATTER_VALUES[key]
            require(is_plain_form, f"{where}.{key}", f"{item!r}", hint="Leave it out.")
            is_file = key == "filename" and item not in _LOGGING_TEXTS
            require(not is_file, f"{where}.filename", f"{item!r}", allowed=_LOGGING_TEXTS[-1])


def _require_no_secret_in_clear(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse what lets Hydra write the typed words, secrets too, into files or names of folders."""
    if not may_hold_secrets(overrides):
        return
    launcher = select_value(cfg, "hydra.launcher._target_")
    require(
        launcher == LauncherSettings._target_ or is_set_by_words("hydra/launcher", overrides),
        "hydra/launcher",
        f"{launcher} in a file would keep your secrets in clear",
        hint="Leave it out, or type it on the command line.",
    )
    # at this level Hydra prints all settings
    logging: Any = _resolved(cfg, "hydra.hydra_logging") or {}
    loggers = logging.get("loggers") or {}
    of_hydra = [part for name, part in loggers.items() if str(name).partition(".")[0] == "hydra"]
    levels = [part["level"] for part in (logging.get("root") or {}, *of_hydra) if "level" in part]
    prints_all = any(str(level).upper() in _LEVELS_OF_ALL for level in levels)
    for key, is_refused in (
        ("hydra.verbose", bool(select_value(cfg, "hydra.verbose"))),
        ("hydra/hydra_logging", prints_all),
    ):
        require(
            not is_refused or is_set_by_words(key, overrides),
            key,
            "logging in a file would show your secrets",
            hint="Leave it out of the file, or type it on the command line.",
        )
    words = select_value(cfg, "hydra.job.override_dirname")
    for key in ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir"):
        value = select_value(cfg, key)
        is_kept = key == "hydra.output_subdir" or (words and words in str(value))
        require(
            value is None or not is_kept,
            key,
            "Hydra would keep your secrets there in clear",
            hint="Leave it out: config.yaml and overrides.txt of the run hold all settings.",
        )


def _resolved(cfg: DictConfig, key: str) -> Any:
    """A part of Hydra's settings as plain values.

    References to settings of Hydra stay as they are: it fills some of them only later.
    """
    settings = select_value(cfg, key)
    if not OmegaConf.is_config(settings):
        return settings
    try:
        plain = OmegaConf.to_container(settings, resolve=True)
    except OmegaConfBaseException:
        plain = OmegaConf.to_container(settings, resolve=False)
    refuse_references(plain, key, but=r"\$\{hydra\.[\w.]+\}")
    return plain
