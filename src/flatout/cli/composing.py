"""Explain errors of composing the settings: one sentence, with the nearest right word.

`explain` reads the words and attributes of errors of Hydra and OmegaConf, without importing either.
Open it when a mistyped setting gets a poor message.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from flatout.__main__ import VERBS
from flatout.callbacks.loggers import LOGGERS
from flatout.checkpoints.settings import CheckpointConfig
from flatout.cli.words import GROUPS, conf_folder
from flatout.config import OWN_PARTS_MAY_SET, REPLACED, TRAINER_ARGUMENTS, MonitorConfig, RunConfig
from flatout.data.samples.cells import CellsConfig
from flatout.data.samples.headlines import HeadlinesConfig
from flatout.data.samples.tagged_tweets import TaggedTweetsConfig
from flatout.data.samples.tweets import TweetsConfig
from flatout.engine.optimizer import OptimConfig
from flatout.errors import RunBroke, UserError, did_you_mean, first_line, nearest
from flatout.files import load_yaml
from flatout.models import MODELS
from flatout.perf.tune.settings import INSTEAD_OF_CUT, TuneConfig
from flatout.price.settings import PriceConfig
from flatout.run.kinds import KINDS

_SAMPLES = {
    "headlines": HeadlinesConfig,
    "tweets": TweetsConfig,
    "tagged_tweets": TaggedTweetsConfig,
}
# the settings class of each option of each group in `conf/`
COMPONENTS: dict[str, dict[str, type]] = {
    "data": {kind.data_option: kind.settings for kind in KINDS},
    "data.sample": {**_SAMPLES, "cells": CellsConfig},
    "model": MODELS,
    "task": {kind.task_option: kind.task.settings for kind in KINDS},
    "optim": {"adamw": OptimConfig},
    "checkpoint": {"best": CheckpointConfig},
    "monitor": {"default": MonitorConfig},
    "tune": {"default": TuneConfig},
    "price": {"default": PriceConfig},
}
OPTIONS = [
    (group, name, kind) for group, classes in COMPONENTS.items() for name, kind in classes.items()
]
# words that other libraries have for a setting, alone or behind a group
WORDS_ELSEWHERE = {
    "learning_rate": "optim.lr",
    "num_train_epochs": "trainer.max_epochs",
    "per_device_train_batch_size": "data.batch_size",
    "checkpoint.monitor": "checkpoint.metric",
    "optim.learning_rate": "optim.lr",
}
# words that other libraries have for what a sweep searches
_SEARCHED_ELSEWHERE = {
    "log": "tag(log,{})",
    "loguniform": "tag(log,{})",
    "log_uniform": "tag(log,{})",
    "uniform": "{}",
}
# errors of a value, or of a name, that does not fit
_OF_VALUES = (
    "ValidationError",
    "KeyValidationError",
    "UnsupportedValueType",
    "ReadonlyConfigError",
)
_KINDS_OF_VALUES = {
    "Integer": "a whole number",
    "Float": "a number",
    "bool": "true or false",
    "String": "a text",
}
# what OmegaConf says of a reference that leads nowhere
_OF_NAMES = re.compile(
    r"Interpolation key '[\w.\[\]]*' not found|Environment variable '\w*' not found"
    r"|Unsupported interpolation type [\w.]+|Recursive interpolation detected"
    r"|MissingMandatoryValue while resolving interpolation: Missing mandatory value: [\w.]+"
)
_MOST_READ = 10_000  # characters of a message in which something is looked for
_ALMOST = 0.75  # least likeness of keys outside of the group that was typed


@dataclass(frozen=True, slots=True)
class _HydraError:
    """What Hydra, OmegaConf or YAML say in an error: some in attributes, some only in words."""

    error: BaseException  # as it was raised
    kind: str  # name of the innermost error's class
    attributes: dict[str, Any]  # of the innermost error; they differ by its class
    message: str  # of all errors of the chain
    reason: str  # of the innermost error

    @classmethod
    def of(cls, error: BaseException, chain: Sequence[BaseException]) -> _HydraError:
        inner = chain[-1]
        # For an error inside of a file Hydra raises one that names only its class. The original is
        # the context of that.
        original = error.__context__
        is_of_file = type(inner).__name__ == "ConfigCompositionException"
        if is_of_file and type(original).__name__ in _OF_VALUES:
            assert original is not None
            inner = original
        message = "\n".join(map(str, chain))
        return cls(error, type(inner).__name__, vars(inner), message, str(inner))

    @property
    def key(self) -> str:
        """The setting, with its groups; empty if none is named."""
        written = _first(r"full_key: (\S+)", self.reason)
        return str(self.attributes.get("full_key") or "") or written

    @property
    def override(self) -> str:
        """The word of the command line; empty if none is named."""
        typed = self.attributes.get("override")
        pattern = r"override '?([^'\n]+?)'?(?:\.? No match.*|\.?)$"
        return typed or _first(pattern, str(self.error))


def explain(error: BaseException) -> UserError | None:
    """The user's mistake behind an error; None for a defect of ours."""
    chain = chain_of(error)
    if (mistake := mistake_in(chain)) is not None:
        return mistake
    if (mistake := _wrong_logging(error) or _wrong_plugin(error)) is not None:
        return mistake
    hydra_error = _HydraError.of(error, chain)
    override = hydra_error.override
    if override and " while evaluating " in hydra_error.message:
        return _wrong_function(override, hydra_error.reason)
    match hydra_error.kind:
        case "MissingConfigException":
            missing = hydra_error.attributes.get("missing_cfg_file") or ""
            group, _, option = missing.rpartition("/")
            return _missing_option(group, option, hydra_error.attributes.get("options") or [])
        case "OverrideParseException" | "LexerNoViableAltException":
            return _unreadable(override)
        case kind if kind in _OF_VALUES:
            value = str(hydra_error.attributes.get("value"))
            return _wrong_value(as_typed(hydra_error.key), value, hydra_error.message)
        case "MissingMandatoryValue":
            return UserError(
                hydra_error.key, "has no value", hint=f"Give it one: {hydra_error.key}=VALUE."
            )
        case "ConfigAttributeError" | "ConfigKeyError" | "ConfigCompositionException":
            return _wrong_key(hydra_error)
        case "AttributeError" | "TypeError" if "full_key: hydra." in hydra_error.message:
            return UserError(
                _first(r"full_key: (\S+)", hydra_error.message),
                "does not fit",
                hint="python -m flatout settings lists what each key may be.",
            )
        case kind if kind.startswith("Interpolation") or kind in (
            "UnsupportedInterpolationType",
            "GrammarParseError",
        ):
            # of the grammar: it quotes what was written
            reason = hydra_error.message.splitlines()[0]
            if hydra_error.kind != "GrammarParseError":
                reason = without_value(hydra_error.message)
            return UserError(hydra_error.key or "conf", reason, hint="Write the value itself.")
    return _unreadable_file(hydra_error)


def _wrong_logging(error: BaseException) -> UserError | None:
    """The mistake of settings that Python's logging refuses, by errors of every class."""
    frames = traceback.extract_tb(error.__traceback__)
    if all(frame.name != "configure_log" for frame in frames):
        return None
    return UserError(
        "hydra.job_logging, hydra.hydra_logging, hydra.verbose",
        f"do not fit ({first_line(error)})",
        hint="Leave them out of the file.",
    )


def _wrong_plugin(error: BaseException) -> UserError | None:
    """The mistake of settings that a launcher or a sweeper of another package refuses, before a run
    begins.
    """
    # The classes themselves: losses of processes and jobs have subclasses. An error within a
    # process has a cause.
    if type(error) not in (ValueError, TypeError, RuntimeError) or error.__cause__ is not None:
        return None
    frames = traceback.extract_tb(error.__traceback__)
    # ours is a module of `hydra_plugins`, theirs are packages
    found = [_first(r"\bhydra_plugins/(\w+)/", Path(frame.filename).as_posix()) for frame in frames]
    packages = [package for package in found if package]
    if not packages or any(frame.name == "run_job" for frame in frames):
        return None
    part = "sweeper" if "sweeper" in packages[-1] else "launcher"  # a sweeper calls its launcher
    return UserError(
        f"hydra.{part}",
        f"does not fit ({first_line(error)})",
        hint=f"Correct that setting, or leave hydra/{part} out.",
    )


def _unreadable_file(hydra_error: _HydraError) -> UserError | None:
    """The mistake of a file that is no YAML, or no settings; None for another error."""
    match hydra_error.kind:
        case "ScannerError" | "ParserError" | "ConstructorError" | "ComposerError" | "ReaderError":
            return UserError(
                "conf", hydra_error.message.replace("\n", " "), hint="The file is not valid YAML."
            )
        case "OSError" if "Invalid loaded object type" in hydra_error.message:
            return UserError("conf", "a file holds no keys", hint="Write KEY: VALUE in each line.")
        case "ConfigTypeError":
            return UserError(
                "conf",
                "a file holds a list where keys stand",
                hint="Write KEY: VALUE in each line.",
            )
        case "RecursionError":
            return UserError(
                "conf", "is nested too deeply", hint="Write the settings with fewer levels."
            )
    return None


def without_value(reason: str) -> str:
    """A reason of OmegaConf without the value that a reference leads to: it may be secret.

    Of its sentences only those are kept that quote names.
    """
    if named := _OF_NAMES.search(reason):
        return named[0]
    fitting = (
        words for kind, words in _KINDS_OF_VALUES.items() if f"converted to {kind}" in reason
    )
    wanted = next(fitting, "")
    return "the value referred to does not fit" + (f" ({wanted})" if wanted else "")


def _wrong_key(hydra_error: _HydraError) -> UserError:
    """The mistake of a key with several values, of a search path in a file, or of no such key."""
    several = _first(
        r"^Ambiguous value for argument '(.+)'$|^Sweep parameters '(.+)' requires",
        hydra_error.message,
    )
    if several:
        return _several_values(several)
    if file := _first(r"^In '(.+)': Overriding hydra\.searchpath", hydra_error.message):
        return UserError(
            f"{file}.yaml: hydra.searchpath",
            "is set by a file",
            hint="Name the folder by --config-dir.",
        )
    return _no_such_key(hydra_error)


def chain_of(error: BaseException, *, with_context: bool = False) -> list[BaseException]:
    """The error and its causes, each once: an error that is raised again may cause itself."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or (link.__context__ if with_context else None)
    return chain


def mistake_in(chain: Sequence[BaseException]) -> UserError | None:
    return next((link for link in chain if isinstance(link, UserError)), None)


@contextmanager
def explain_errors() -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf into a UserError; let any other error pass."""
    try:
        yield
    except RunBroke:
        raise
    except Exception as error:
        # errors of Hydra, YAML, the parser and user classes share no class
        for link in chain_of(error, with_context=True):
            # Ctrl-C inside of OmegaConf may surface as its own error, with the signal in the chain.
            if isinstance(link, KeyboardInterrupt | SystemExit):
                raise link from None
        if (mistake := explain(error)) is None:
            raise
        raise mistake from None


def _missing_option(group: str, option: str, options: Sequence[str]) -> UserError:
    hint = did_you_mean(option, options)
    # of `data=news/train.csv` Hydra takes the folder for a part of the group's name
    first, _, typed = f"{group}/{option}".partition("/")
    if first == "data" and is_like_file(typed):
        group = first
        option = typed
        hint = f"To train on a file, write data.source={typed}."
    if group == "experiment":
        hint = f"{hint} To name a run, set name={option}.".lstrip()
    if (group, option) == ("tune", "cut"):
        hint = INSTEAD_OF_CUT
    return UserError(
        group, f"no option {option!r}", allowed=", ".join(options) or "no options", hint=hint
    )


def is_like_file(value: str) -> bool:
    """Whether a value names a file or a folder rather than an option: `news.csv`, `data/`."""
    return "/" in value or Path(value).suffix != "" or Path(value).exists()


def _unreadable(override: str) -> UserError:
    hint = "Write key=value; quote a value with blanks or brackets: 'key=\"a b\"'."
    if override == "help":
        hint = "Write python -m train --help."
    elif override in VERBS:
        hint = f"That is a verb of another command: python -m flatout {override}."
    elif re.fullmatch(r"[\w.]+", override) and (key := find_key(override)):
        hint = f"Write {key}=VALUE."
    elif "=" not in override and (Path(override) / "overrides.txt").is_file():
        hint = (
            f"To resume that run, write resume={override}; its settings stand in its overrides.txt."
        )
    elif "=" not in override and Path(override).exists():
        hint = f"To train on that file, write data.source={override}."
    return UserError("command line", f"cannot read {override!r}", hint=hint)


def _wrong_function(override: str, reason: str) -> UserError:
    """The mistake of a value such as `log(1e-4,1e-2)`, which Hydra cannot evaluate."""
    key, _, value = override.lstrip("+").partition("=")
    name, _, arguments = value.partition("(")
    if name in _SEARCHED_ELSEWHERE:
        meant = _SEARCHED_ELSEWHERE[name].format(f"interval({arguments}")
        return UserError(
            key, f"{value}: no function {name!r}", hint=f"In a sweep write '{key}={meant}'."
        )
    first = reason.splitlines()[0] if reason else "it cannot be evaluated"
    return UserError(
        key,
        f"{value}: {first[:1].lower()}{first[1:]}",
        hint="Sweeps know choice(…), range(…) and interval(…); quote a text with brackets.",
    )


def _wrong_value(key: str, value: str, message: str) -> UserError:
    if "is not Optional" in message:
        return UserError(key, "null does not fit", hint="Give it a value, or leave it out.")
    wanted = _first(r"converted to (\w+)|expected one of \[(.*?)\]|not a valid (bool)", message)
    last = message.rsplit("\nValue", 1)[-1]
    allowed = _KINDS_OF_VALUES.get(wanted, wanted)
    value = value if value != "None" else _first(r"[Vv]alue '([^']*)'", last)
    hint = "" if allowed else f"python -m flatout settings {key} shows an example."
    hint = did_you_mean(value, allowed.split(", ")) if "," in allowed else hint
    if "is not a ListConfig" in last:
        allowed = "a list"
        hint = f"Write {key}=[{value}]."
    return UserError(key, f"{value!r} does not fit", allowed=allowed, hint=hint)


def _several_values(word: str) -> UserError:
    key, _, values = word.lstrip("+").partition("=")
    as_list = f"write '{key}=[{values}]' for one run with all of them"
    hint = "Add -m to python -m train for a run with each"
    if any(re.search(r"\b(list|Any)\b", str(field.type)) for field in _fields_of(key)):
        hint = f"{hint}, or {as_list}"
    if key == "logger":
        hint = as_list.capitalize()
    return UserError(key, f"several values ({values}) for one run", hint=f"{hint}.")


def _no_such_key(hydra_error: _HydraError) -> UserError:
    """The mistake of a key that is not there, or that is there already and was added again."""
    if plain := _first(r"Either remove \+ prefix: '(.+)'$", hydra_error.message):
        return UserError(
            plain.partition("=")[0], "is there already", hint=f"Leave out the plus sign: {plain}."
        )
    override = (
        _first(r"To append to your config use \+(\S+)", hydra_error.message)
        or hydra_error.override
        or _first(r"Could not delete from config\. '(.+?)' does not exist", hydra_error.message)
    )
    typed_key = override.lstrip("+~").partition("=")[0]
    # Hydra names the first part that is not there
    first_missing = hydra_error.key or typed_key
    full_key = typed_key if typed_key.startswith(f"{first_missing}.") else first_missing
    beside = []
    for link in chain_of(hydra_error.error, with_context=True):
        kind = vars(link).get("object_type")  # the class that has no such field
        if isinstance(kind, type) and is_dataclass(kind):
            beside = [field.name for field in fields(kind) if not field.name.startswith("_")]
            break
    file = _first(r"In '([^']+)'", hydra_error.message)
    return unknown_key(first_missing, beside, typed=full_key, file=file)


def _first(pattern: str, text: str) -> str:
    # a message may quote a value of a file as a whole, and a pattern may begin anew at each place
    found = re.search(pattern, text[:_MOST_READ], re.MULTILINE)
    return next(filter(None, found.groups()), "") if found else ""


def unknown_key(
    key: str, beside: Sequence[str] = (), *, typed: str = "", file: str = ""
) -> UserError:
    """The mistake of an unknown key; `beside` are the keys of its group.

    `key` may be only the first part that is not there, `typed` is then the whole key. `file` is the
    file in which it stands.
    """
    parent = key.rpartition(".")[0]
    if parent == "trainer":
        return _unknown_argument(key)
    if parent == "logger" and (logger := key.rpartition(".")[2]) in LOGGERS:
        return UserError(
            typed or key,
            f"{logger} is not chosen",
            hint=f"Add logger={logger}, or logger=[tensorboard,{logger}] for both.",
        )
    # a setting that is a dictionary takes any key of the user's
    if any(field.default_factory is dict for field in _fields_of(parent)):
        return UserError(
            key, "no such key", hint=f"Keys of {parent} are added with a plus sign: +{key}=VALUE."
        )
    hint = where_listed(parent)
    near = _nearest_key(key, beside, typed or key)
    options = [
        f"{group.partition('.')[0]}={name}"
        for group, name, kind in OPTIONS
        if key in _field_names(kind, f"{group}.")
    ]
    if options:
        hint = f"It is a setting of {', '.join(options)}. {hint}"
    elif near:
        hint = f"Did you mean {as_typed(near)!r}? {hint}"
    where = f"{file}.yaml: {key}" if file else as_typed(key)
    allowed = ", ".join(beside) if len(beside) <= 24 else ""
    return UserError(where, "no such key", allowed=allowed, hint=hint)


def where_listed(group: str) -> str:
    """A sentence that names the command which lists the keys of a group."""
    first = group.partition(".")[0]
    if first == "hydra":
        return ""
    if any(key.startswith(f"{first}.") for key in known_keys()):
        return f"python -m flatout settings {first} lists all."
    return "python -m flatout settings lists all."


def as_typed(key: str) -> str:
    """A key as users type it: settings of the launcher without `hydra.`."""
    return key.removeprefix("hydra.") if key.startswith("hydra.launcher.") else key


def find_key(word: str) -> str | None:
    """The setting that is meant by a word without its group: both `batch_size` and `bach_size`
    mean `data.batch_size`.
    """

    def rank(key: str) -> tuple[int, int]:  # less deep first, then in the order of the groups
        group = key.partition(".")[0]
        return key.count("."), GROUPS.index(group) if group in GROUPS else len(GROUPS)

    # Several keys may end in the same name. A dictionary keeps the last of them, so the one that is
    # preferred comes last.
    by_name = {key.rpartition(".")[2]: key for key in sorted(known_keys(), key=rank, reverse=True)}
    top = [*GROUPS, *(field.name for field in fields(RunConfig))]
    by_name |= dict(zip(top, top, strict=True))
    if word in by_name:
        return by_name[word]
    # `modle` is like `mode`, a setting of checkpoints. But a word without a group most likely means
    # a group, or a setting that stands in none: these are tried first.
    near = nearest(word, top, least=_ALMOST) or nearest(word, by_name, least=_ALMOST)
    return by_name[near] if near else None


def setting_meant(option: str, words: Sequence[str]) -> str | None:
    """The setting that is meant by an option, with its value from the words; None for no setting.

    `--data`, `rows.csv` → `data.source=rows.csv`
    """
    name, _, value = option.lstrip("-").partition("=")
    name = name.replace("-", "_")
    behind = list(words)[list(words).index(option) + 1 :] if option in words else []
    if not value and behind and "=" not in behind[0] and not behind[0].startswith("-"):
        value = behind[0]
    value = value or "VALUE"
    key: str | None = WORDS_ELSEWHERE.get(name, name)
    if key not in known_keys():
        key = find_key(name)
    if key == "data" and is_like_file(value):
        key = "data.source"
    return f"{key}={value}" if key else None


def _nearest_key(key: str, beside: Sequence[str], typed: str) -> str | None:
    """The key that was meant: in its group, in another, or with its group."""
    if typed in WORDS_ELSEWHERE:
        return WORDS_ELSEWHERE[typed]
    parent, _, name = key.rpartition(".")
    if typed != key and (whole := nearest(typed, known_keys(), least=_ALMOST)):
        return whole
    if not parent:
        return find_key(name) or nearest(name, beside)
    if near := nearest(name, beside):
        return f"{parent}.{near}"
    for known in known_keys():
        if known.rpartition(".")[2] == name:
            return known
    return nearest(key, known_keys(), least=_ALMOST)


def _unknown_argument(key: str) -> UserError:
    """The mistake of a key of Lightning's Trainer: most of its arguments need a plus sign."""
    name = key.rpartition(".")[2]
    if name in REPLACED and name not in OWN_PARTS_MAY_SET:
        return UserError(key, "flatout passes this argument", hint=f"Set {REPLACED[name]} instead.")
    if name in TRAINER_ARGUMENTS:
        return UserError(
            key,
            "no such key",
            hint=f"Arguments of Lightning's Trainer are added with a plus sign: +{key}=VALUE.",
        )
    near = nearest(name, TRAINER_ARGUMENTS)
    hint = where_listed("trainer")
    if near:
        plus = "" if near in ours_of_trainer() else "+"
        hint = f"Did you mean '{plus}trainer.{near}'? {hint}"
    return UserError(key, "no such key", hint=hint)


def known_keys() -> list[str]:
    """Dotted names of all settings."""
    keys = {field.name for field in fields(RunConfig)}
    keys |= {f"trainer.{name}" for name in ours_of_trainer()}
    for group, _, kind in OPTIONS:
        keys |= set(_field_names(kind, f"{group}."))
    for name, kind in LOGGERS.items():
        keys |= set(_field_names(kind, f"logger.{name}."))
    return sorted(keys)


def _field_names(settings: type, prefix: str) -> Iterator[str]:
    for field in fields(settings):
        yield f"{prefix}{field.name}"
        if isinstance(field.default_factory, type) and is_dataclass(field.default_factory):
            yield from _field_names(field.default_factory, f"{prefix}{field.name}.")


def _fields_of(key: str) -> list[Field[Any]]:
    group, _, name = key.partition(".")
    return [
        field
        for kind in COMPONENTS.get(group, {}).values()
        for field in fields(kind)
        if field.name == name
    ]


def ours_of_trainer() -> dict[str, Any]:
    """Arguments of Lightning's Trainer that are set without a plus sign, and their values."""
    file = conf_folder() / "trainer" / "default.yaml"
    settings = load_yaml(file) if file.is_file() else None  # a folder of others may lack it
    return dict(settings) if isinstance(settings, dict) else {}
