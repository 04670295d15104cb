"""The boundary: Hydra's settings go in, dataclasses come out.

Settings may come from other people, and Hydra imports and calls any class that a `_target_` names.
So `targets.py` lists which classes are allowed, and `typed.py` which values the command line alone
may set. Here both are applied, and folders checked, before dataclasses are made.

Hydra also acts on its own settings before it runs a job: it imports what `hydra.searchpath` names,
and calls what callbacks, plugins and logging name. `check_hydra` checks those first.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, RangeSweep
from hydra.core.plugins import Plugins
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning import seed_everything
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from flatout.cli.composing import (
    chain_of,
    explain_errors,
    mistake_in,
    unknown_key,
    without_value,
)
from flatout.cli.own_classes import hold_optimizer, hold_task
from flatout.cli.targets import (
    check_targets,
    import_allowed_class,
    is_allowed,
    targets,
    trust_package,
)
from flatout.cli.typed import (
    ONLY_TYPED,
    check_growth,
    check_resolved,
    check_values,
    check_values_of_hydra,
    is_typed_value,
    nodes,
    secret_keys,
)
from flatout.config import NAMES, RunConfig
from flatout.errors import UserError, require
from flatout.files import is_plain_part, require_inside
from flatout.masking import mask_words
from flatout.run.run_folder import require_no_link_outside
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
_MOST_TRIALS = 100_000
_PLUGINS = ("hydra.callbacks", "hydra.launcher", "hydra.sweeper")  # Hydra makes them
# Others keep their results as pickles, or start programs.
_PLAIN_LAUNCHERS = (
    LauncherSettings._target_,
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
)
_LEVELS_OF_ALL = ("DEBUG", "NOTSET", "0", "10")
# of a form of messages: what a file may say of how it is filled in, and checked
_FORMS = {"style": "%", "validate": True}


def read_config(cfg: DictConfig, overrides: Sequence[str]) -> RunConfig:
    """The settings of one run, from the composed configuration and the typed words."""
    _require_known_keys(cfg, "")
    written: Any = OmegaConf.to_container(cfg, resolve=False)
    allowed = allowed_targets(cfg, overrides)
    check_values(written, overrides)
    # behind the check: it looks behind references, and its errors quote what they find there
    if missing := sorted(OmegaConf.missing_keys(cfg)):
        raise UserError(missing[0], "has no value", hint=f"Give it one: {missing[0]}=VALUE.")
    try:
        OmegaConf.resolve(cfg)  # once, so the checked values are the used ones
    except OmegaConfBaseException as error:
        key = str(error.full_key or "settings")
        reason = without_value(str(error))
        raise UserError(key, reason, hint="Write the value itself.") from None
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    _refuse_references(plain, "")
    check_resolved(written, plain, overrides)
    folders = [Path(cfg.output)]
    if HydraConfig.initialized():
        runtime = HydraConfig.get().runtime
        if not OmegaConf.is_missing(runtime, "output_dir"):
            folders.append(Path(runtime.output_dir))
    if cfg.resume not in (None, "auto") and not _is_typed("resume", overrides):
        require_inside(str(cfg.resume), folders, "resume")  # the run writes there
    check_targets(plain, allowed, folders)
    find_class = partial(import_allowed_class, allowed=allowed)
    with explain_errors():
        hold_task(cfg, find_class)
    hold_optimizer(cfg, find_class)
    if isinstance(cfg.seed, int) and 0 <= cfg.seed < 1 << 32:
        # modules of your own draw their weights while they are built
        seed_everything(cfg.seed, verbose=False)
    try:
        return instantiate(cfg, _convert_="object")
    except InstantiationException as error:
        if (mistake := mistake_in(chain_of(error))) is not None:
            raise mistake from None
        reason = " ".join(str(error).split())
        raise UserError(
            "", reason, hint="These arguments do not fit the class that _target_ names."
        ) from None


def _require_known_keys(settings: DictConfig, where: str) -> None:
    """Refuse a key that no class has: typed with a plus sign, Hydra adds it to any group."""
    kind = OmegaConf.get_type(settings)
    public_keys = (key for key in map(str, settings) if not key.startswith("_"))
    if is_dataclass(kind):
        names = [field.name for field in fields(kind) if not field.name.startswith("_")]
        for name in public_keys:
            if name not in names:
                raise unknown_key(f"{where}.{name}".lstrip("."), names)
    for name in map(str, settings):
        child = settings._get_node(name)
        if isinstance(child, DictConfig) and not (
            child._is_none() or child._is_missing() or child._is_interpolation()
        ):
            _require_known_keys(child, f"{where}.{name}".lstrip("."))


def as_typed(words: Sequence[str]) -> list[str]:
    """Words of a command line, without resolving references in them."""
    typed: Any = OmegaConf.to_container(words, resolve=False)
    return [str(word) for word in typed]


def allowed_targets(cfg: DictConfig, overrides: Sequence[str]) -> tuple[str, ...]:
    """The packages that the command line trusts; a file cannot trust any."""
    allowed = cfg.get("allow_targets") or ()
    require(OmegaConf.is_list(allowed) or allowed == (), "allow_targets", "is no list")
    require(
        not allowed or _is_typed("allow_targets", overrides),
        "allow_targets",
        "stands in a file",
        hint=ONLY_TYPED,
    )
    return tuple(allowed)


def check_hydra(cfg: DictConfig, overrides: Sequence[str], *, is_trial: bool) -> None:
    """Refuse settings of Hydra that execute code, or write elsewhere, before a run begins.

    `overrides` are the words that were typed. `is_trial`: whether this is a trial of a sweep that
    has begun, whose folder holds what the sweep itself has written.
    """
    settings = cfg.hydra
    for kind in ("task", "hydra"):
        invented = [word for word in as_typed(settings.overrides[kind]) if word not in overrides]
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
    # Python imports from the folder that it is in, and files may bring one along
    _require_typed_parts("hydra.job.chdir", plain["job"]["chdir"], overrides)
    # Hydra has put the variables of `env_copy` into `env_set`.
    copied = plain["job"]["env_copy"] if _is_typed("hydra.job.env_copy", overrides) else []
    env = {name: value for name, value in plain["job"]["env_set"].items() if name not in copied}
    _require_typed_parts("hydra.job.env_set", env, overrides)
    # Hydra fills it when a run begins; a log that is opened before would go where a file says.
    folder = "hydra.runtime.output_dir"
    if not OmegaConf.is_missing(settings.runtime, "output_dir"):
        _require_typed_parts(folder, plain["runtime"]["output_dir"], overrides)
    for name in ("hydra_logging", "job_logging"):
        _check_logging(plain[name], f"hydra.{name}")
    _check_folders(cfg, overrides, is_trial=is_trial)
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
    require(few, "hydra.sweeper.params", f"{trials:,.0f} trials", allowed=f"{_MOST_TRIALS:,}")


def _check_plugins(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse a launcher, a sweeper or a callback of a package that is not trusted."""
    allowed = allowed_targets(cfg, overrides)
    plain: Any = OmegaConf.to_container(cfg.hydra, resolve=False)
    for key, value in nodes(plain, "hydra"):
        _require_no_part_elsewhere(cfg, key, value)
    for key in ("launcher", "sweeper", "callbacks", "job.env_set"):
        parts = [_value(cfg, f"hydra.{key}")]
        if key == "callbacks" and OmegaConf.is_dict(parts[0]):
            parts = [_value(cfg, f"hydra.callbacks.{name}") for name in parts[0]]
        is_fitting = all(map(OmegaConf.is_dict, parts))
        require(is_fitting, f"hydra.{key}", "does not fit", allowed="a mapping")
    for group in ("launcher", "sweeper", "callbacks"):
        for where, described in targets(_resolved(cfg, f"hydra.{group}"), f"hydra.{group}"):
            target = described["_target_"]
            if group != "callbacks" and where == f"hydra.{group}":
                is_typed = _is_typed(f"hydra/{group}", overrides)
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
        is_whole = OmegaConf.is_config(_value(cfg, key))
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
        is_typed = not value or _is_typed(key, overrides)
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
            is_plain_form = key not in _FORMS or item == _FORMS[key]
            require(is_plain_form, f"{where}.{key}", f"{item!r}", hint="Leave it out.")
            is_file = key == "filename" and item not in _LOGGING_TEXTS
            require(not is_file, f"{where}.filename", f"{item!r}", allowed=_LOGGING_TEXTS[-1])


def _check_folders(cfg: DictConfig, overrides: Sequence[str], *, is_trial: bool) -> None:
    """A typed folder may lie anywhere; a folder from a file must lie below `output`."""
    numbered = cfg.copy()
    with open_dict(numbered):
        for name in ("num", "id"):  # Hydra fills these when a trial begins
            if OmegaConf.is_missing(numbered.hydra.job, name):
                numbered.hydra.job[name] = 0
    name = _value(numbered, "name")
    if isinstance(name, str):
        require(is_plain_part(name), "name", repr(name), allowed=NAMES)
        if not _is_typed("name", overrides):
            _require_plain_folder(name, "name")
    output = Path(str(_value(numbered, "output")))
    if not _is_typed("output", overrides):
        _check_output(output)
    for key in ("hydra.run.dir", "hydra.sweep.dir"):
        folder = str(_value(numbered, key))
        require(folder.isprintable(), key, repr(folder), allowed="a folder")
        if not _is_typed(key, overrides):
            _check_folder_of_runs(folder, key, output)
            if not is_trial:
                _require_files_of_its_own(Path(folder))
    sweep = Path(str(_value(numbered, "hydra.sweep.dir")))
    if not is_trial:
        _require_plain_launcher(numbered, sweep, overrides)
    _check_launcher(numbered, sweep, overrides)
    for key in ("hydra.sweep.subdir", "hydra.output_subdir", "hydra.job.name"):
        part = _value(numbered, key)
        require(
            part is None or is_plain_part(str(part)),
            key,
            repr(part),
            allowed="a name below the run folder",
        )
        if part is not None and not _is_typed(key, overrides):
            _require_plain_folder(str(part), key)


def _check_output(output: Path) -> None:
    """Refuse a folder of runs that a file names elsewhere than below the working directory."""
    _require_plain_folder(str(output), "output")
    # The folder in which you start is yours. Any other one of the disk is not for a file to choose.
    relative = os.path.relpath(output) if output.is_absolute() else str(output)
    require(
        is_plain_part(relative),
        "output",
        f"a file names {str(output)!r}",
        allowed="a folder below the working directory",
        hint=f"Type it on the command line: output={shlex.quote(str(output))}",
    )
    usual = RunConfig().output
    if str(output) != usual:
        # A link that came with the files may lead anywhere; the usual folder may be a link of yours
        require_inside(
            str(output),
            [Path.cwd(), Path(usual)],
            "output",
            "Type it on the command line.",
            of="the working directory",
        )


def _check_folder_of_runs(folder: str, key: str, output: Path) -> None:
    """Refuse a folder of a run or of a sweep that a file names elsewhere than below `output`."""
    _require_plain_folder(folder, key)
    require_inside(folder, [output], key)
    # A run whose folder is taken lies beside it, which must be below `output`, too. A sweep has no
    # other folder than the one that is named.
    is_of_all = os.path.realpath(folder) == os.path.realpath(output)
    is_below = key == "hydra.sweep.dir" or not is_of_all
    require(is_below, key, f"{folder!r} is the folder of all runs", allowed="one below it")


def _require_files_of_its_own(folder: Path) -> None:
    """Refuse a folder that is there already, with files that are other files, too.

    Hydra writes its settings and logs there before a run looks at it.
    """
    require_no_link_outside(folder)
    for path in folder.rglob("*"):
        require(
            not path.is_file() or path.lstat().st_nlink == 1,
            str(path),
            "is a file that has another name, too",
            hint="Remove it, or type the folder on the command line.",
        )


def _require_plain_folder(folder: str, key: str) -> None:
    """Refuse signs by which a library may take a folder's name for more than a name.

    `$NAME` is a variable of the environment to loggers, and an address ends at `?` and `#`.
    """
    require(
        not re.search(r"[$%?#]", folder),
        key,
        repr(folder),
        allowed="a folder without $, %, ? and #, where a file names it",
        hint=ONLY_TYPED,
    )


def _require_plain_launcher(cfg: DictConfig, sweep: Path, overrides: Sequence[str]) -> None:
    """Refuse a launcher of a file but ours and Hydra's; and for others a sweep's old folder.

    submitit unpickles what it finds under the name of a result.
    """
    launcher = _value(cfg, "hydra.launcher._target_")
    if launcher in _PLAIN_LAUNCHERS:
        return
    require(
        _is_typed("hydra/launcher", overrides),
        "hydra/launcher",
        f"{launcher} stands in a file",
        hint=ONLY_TYPED,
    )
    require(
        _is_typed("hydra.sweep.dir", overrides) or not sweep.exists(),
        "hydra.sweep.dir",
        f"{sweep} is there already, and {launcher} unpickles results in it",
        hint="Name a new folder, or type this one on the command line.",
    )


def _check_launcher(cfg: DictConfig, sweep: Path, overrides: Sequence[str]) -> None:
    """Refuse values of a launcher in a file that leave the sweep, or break out of their line.

    submitit puts them into lines of a shell script.
    """
    written: Any = OmegaConf.to_container(cfg.hydra.launcher, resolve=False)
    for key, text in nodes(written, "hydra.launcher"):
        if not isinstance(text, str) or _is_typed(key, overrides):
            continue
        value = _value(cfg, key) if "${" in text else text
        is_line = isinstance(value, str) and value.isprintable()
        require(is_line, key, repr(value), allowed="a text of one line", hint=ONLY_TYPED)
        if key.endswith("folder"):
            require_inside(
                str(value), [sweep], key, "Begin it with ${hydra.sweep.dir}/.", of="the sweep"
            )


def _require_no_secret_in_clear(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse what lets Hydra write the typed words, secrets too, into files or names of folders."""
    if mask_words(overrides) == list(overrides):
        return
    launcher = _value(cfg, "hydra.launcher._target_")
    require(
        launcher == LauncherSettings._target_ or _is_typed("hydra/launcher", overrides),
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
        ("hydra.verbose", bool(_value(cfg, "hydra.verbose"))),
        ("hydra/hydra_logging", prints_all),
    ):
        require(
            not is_refused or _is_typed(key, overrides),
            key,
            "logging in a file would show your secrets",
            hint="Leave it out of the file, or type it on the command line.",
        )
    words = _value(cfg, "hydra.job.override_dirname")
    for key in ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir"):
        value = _value(cfg, key)
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
    settings = _value(cfg, key)
    if not OmegaConf.is_config(settings):
        return settings
    try:
        plain = OmegaConf.to_container(settings, resolve=True)
    except OmegaConfBaseException:
        plain = OmegaConf.to_container(settings, resolve=False)
    _refuse_references(plain, key, but=r"\$\{hydra\.[\w.]+\}")
    return plain


def _refuse_references(plain: object, key: str, *, but: str = "(?!)") -> None:
    """Refuse texts with a reference `${…}`, other than those that the pattern `but` fits."""
    for where, value in nodes(plain, key):
        refers = isinstance(value, str) and "${" in re.sub(but, "", value)
        require(
            not refers, where, f"{value!r} refers to another value", hint="Write the value itself."
        )


def _value(cfg: DictConfig, key: str) -> Any:
    """A setting; None if it is missing or not known yet."""
    try:
        return OmegaConf.select(cfg, key)
    except OmegaConfBaseException:
        return None


def _is_typed(key: str, overrides: Sequence[str]) -> bool:
    """Whether the command line sets a key, or one below it."""
    names = [re.split(r"[=@]", word.lstrip("+~"), maxsplit=1)[0] for word in overrides]
    return any(name == key or name.startswith(f"{key}.") for name in names)
