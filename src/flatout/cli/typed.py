"""Settings that only the command line may have: addresses, receivers of results, and secrets.

A file of settings may come from others. With an address in a file, its author chooses which server
is asked, with your credentials. With `${oc.env:KEY}` beside it, that server also receives a secret.
So files may hold neither. Nor may they refer to a typed value that holds such a reference:
`${data.encoding.secret}` would copy the secret elsewhere.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flatout.cli.words import key_of, translate_word
from flatout.errors import UserError, first_line, require
from flatout.files import is_plain_part
from flatout.masking import mask_words

ONLY_TYPED = "Type it on the command line: files may not set it."
KEYS_ONLY_TYPED = (
    "allow_targets",
    "logger.mlflow.tracking_uri",
    "logger.wandb.entity",
    "data.cache",
    "trainer.model_registry",
)
"""Settings that let code in, choose who receives the results of a run, or where stores are written
and removed."""
# A logger has any name, also one with dots: its class alone says what it is.
_RECEIVERS = re.compile(r"logger\..*(tracking_uri|entity)\b")
# Trackio's project and name become folders of checkpoints, as those of other loggers may.
_NAMES_OF_LOGGERS = re.compile(r"logger\..*\b(project|experiment|name|group)")
_SECRETS = ("data.encoding.secret",)
_REFERENCE = re.compile(r"\$\{\s*([\w.\[\]]+)\s*\}")
_MOST_LETTERS = 1_000_000  # of a text once its references are followed
_TIME = re.compile(r"\$\{now:[^${}]*\}")
_ADDRESS = re.compile(
    r"://|\w::|^\s*[a-z][a-z0-9+.-]+:[/\\]|^\s*(file|local|data|sqlite):", re.IGNORECASE
)
# Settings beside the groups that conf/ has.
_SETTINGS = (
    "allow_targets",
    "budget",
    "compile",
    "graph",
    "name",
    "output",
    "precision",
    "resume",
    "resume_anyway",
    "seed",
    "threads",
    "until",
)
# A sweep hands these to its trials as words, where they would count as typed.
_SEARCHED = ("hydra.sweeper.params", "hydra.sweeper.space")
# A trial that set these would lie, or continue a run, wherever a file says.
_OF_ONE_RUN = ("resume", "output")
_REPEATED = ("hydra.job.override_dirname",)  # Hydra repeats the typed words there
# parts of Hydra's settings that are checked elsewhere: what was typed, and logging
_ELSEWHERE = ("overrides", "job_logging", "hydra_logging")
# these hold addresses of Hydra's own: of its pages, and of the folders that it reads
_WITH_ADDRESSES = ("hydra.help", "hydra.hydra_help", "hydra.runtime", "hydra.searchpath")
# Hydra acts on these while it composes, and its errors quote them.
_READ_EARLY = re.compile(r"(?:^|\.)(?:searchpath|env_copy)(?:\[|\.|$)")
_TYPED_WORDS = ("hydra.overrides", "hydra.job.override_dirname", "hydra.job.env_set")


def check_values(settings: Mapping[Any, Any], words: Sequence[str]) -> None:
    """Refuse values in files that only the command line may set.

    `settings`: all of them, with their references unresolved. `words`: those that are typed.
    """
    # With `data.encoding.secret='${oc.env:KEY}'` typed, which is allowed, a file may not have
    #
    #     data.source: https://example.org/rows.csv     an address
    #     name: ${oc.env:KEY}                           the environment
    #     name: ${data.encoding.secret}                 a copy of the secret
    secrets = secret_keys(settings, words)
    for key, value in nodes(settings, ""):
        _require_typed(key, value, words)
        if isinstance(value, str) and not is_typed_value(key, value, words):
            _check_text(key, value, secrets)
            _require_none_of_hydra(key, value)


def check_growth(settings: Mapping[Any, Any]) -> None:
    """Refuse references that make long texts of short ones.

    Forty lines such as `a: ${b}${b}`, `b: ${c}${c}` would make 2^40 letters.
    """
    written = dict[str, object]()
    for key, value in nodes(settings, ""):
        # first: a mapping comes before its names, which have the same key
        written.setdefault(_dotted(key), value)
    lengths: dict[str, int] = {}

    def length_of(key: str) -> int:
        """Letters of a value once its references are followed; 0 of one that refers to itself."""
        if key not in lengths:
            lengths[key] = 0
            value = written.get(key)
            if isinstance(value, Mapping | list):
                names = value if isinstance(value, Mapping) else range(len(value))
                parts = [f"{key}.{name}" for name in names]
                lengths[key] = sum(map(length_of, parts))
            elif key in written:
                text = str(value)
                parts = [_absolute(name, key) for name in _REFERENCE.findall(text)]
                lengths[key] = len(text) + sum(map(length_of, parts))
            else:
                lengths[key] = sum(map(length_of, _through_others(key, written)))
        return lengths[key]

    for key, value in written.items():
        if isinstance(value, str) and "${" in value:
            try:
                length = length_of(key)
            except RecursionError:
                raise UserError(key, "refers to a value through too many others") from None
            require(length <= _MOST_LETTERS, key, "its references unfold to too long a text")


def _absolute(name: str, key: str) -> str:
    """The key that a reference names: `..x` in `a.b.c` is `a.x`."""
    names = _dotted(name).lstrip(".")
    above = len(_dotted(name)) - len(names)
    return ".".join([*key.split(".")[:-above], names]) if above else names


def _through_others(key: str, written: Mapping[str, object]) -> list[str]:
    """The key that a key is reached by where one above it refers to another: at most one.

    With `a: ${b}` the key `a.x` is `b.x`.
    """
    names = key.split(".")
    for count in range(len(names) - 1, 0, -1):
        above = ".".join(names[:count])
        value = written.get(above)
        reference = _REFERENCE.fullmatch(value.strip()) if isinstance(value, str) else None
        if reference:
            return [".".join([_absolute(reference[1], above), *names[count:]])]
    return []


def check_resolved(
    settings: Mapping[Any, Any], resolved: Mapping[Any, Any], words: Sequence[str]
) -> None:
    """Refuse what `check_values` refuses where references have put it together.

    `settings`: as `check_values` saw them. `resolved`: the same with the values referred to.
    """
    # With `data.label: "s3:"` a file could have `data.source: ${data.label}//bucket`.
    written = dict(nodes(settings, ""))
    for key, value in nodes(resolved, ""):
        _require_typed(key, value, words)
        if isinstance(value, str) and _NAMES_OF_LOGGERS.fullmatch(key):
            is_typed = is_typed_value(key, str(written.get(key, "")), words)
            require(
                is_typed or is_plain_part(value),
                key,
                repr(value),
                allowed="a name without '..' that begins with no '/', where a file says it",
            )
        if isinstance(value, str) and _is_address(value):
            # A file may refer to a typed address, which then stands whole in a word.
            is_typed = is_typed_value(key, str(written.get(key, "")), words)
            is_copy = any(value in word for word in words)
            require(is_typed or is_copy, key, "an address stands in a file", hint=ONLY_TYPED)


def check_read_early(text: str, where: str) -> None:
    """Refuse a YAML text that asks the environment for what Hydra acts on while it composes.

    With a file for each guess at a secret, a list of defaults would tell a server which guess is
    right. Errors about a search path, or about a variable to copy, would print what it asks for.
    """
    if "$" not in text and "\\" not in text:  # YAML can write `$` as "\x24"
        return
    try:
        # By OmegaConf, as Hydra reads the file: it takes dates and tags that `safe_load` refuses.
        written = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (RecursionError, ValueError) as error:
        raise UserError(where, f"is not valid YAML: {first_line(error)}") from None
    for key, value in nodes(written, ""):
        if not isinstance(value, str) or "${" not in value:
            continue
        if key.startswith("defaults"):
            _check_text(f"{where}: {key}", value, _SECRETS)
        is_early = _READ_EARLY.search(key) is not None
        require(not is_early, f"{where}: {key}", "a reference", hint="Write the value itself.")


def check_values_of_hydra(
    settings: Mapping[Any, Any], words: Sequence[str], secrets: Sequence[str]
) -> None:
    """The same for Hydra's own settings, whose sweepers make words of what a file says.

    `secrets`: keys whose values files may not refer to.
    """
    # Hydra puts variables of the environment into `env_set`.
    if may_hold_secrets(words) or (settings.get("job") or {}).get("env_set"):
        secrets = [*secrets, *_TYPED_WORDS]
    for group in settings:
        for key, value in nodes(settings[group], f"hydra.{group}"):
            if group in _ELSEWHERE or not isinstance(value, str) or key in _REPEATED:
                continue
            if not is_typed_value(key, value, words):
                check = _check_references if key.startswith(_WITH_ADDRESSES) else _check_text
                check(key, value, secrets)
                if key.startswith(_SEARCHED):
                    _check_searched(key, value)


def _is_only_typed(key: str) -> bool:
    """Whether the command line alone may set a key, or one below it."""
    return key.startswith(KEYS_ONLY_TYPED) or _RECEIVERS.match(key) is not None


def _require_typed(key: str, value: object, words: Sequence[str]) -> None:
    is_free = key not in KEYS_ONLY_TYPED and _RECEIVERS.fullmatch(key) is None
    is_empty = value in (None, [], "???")
    require(
        is_free or is_empty or is_typed_value(key, "", words),
        key,
        "stands in a file",
        hint=ONLY_TYPED,
    )


def is_typed_value(key: str, text: str, words: Sequence[str]) -> bool:
    """Whether a value was typed: by its own key, or as a part of a typed mapping or list.

    `logger=[mine]` chooses files, so a word for a key above counts only where the text itself
    stands in it.
    """
    for word in words:
        name, _, typed = word.lstrip("+").partition("=")
        if name == key:
            return True
        if text and key.startswith((f"{name}.", f"{name}[")) and text in typed:
            return True
    return False


def words_as_entered(words: Sequence[str]) -> list[str]:
    """Words of a command line, without resolving references in them."""
    typed: Any = OmegaConf.to_container(words, resolve=False)
    return [str(word) for word in typed]


def refuse_references(plain: object, key: str, *, but: str = "(?!)") -> None:
    """Refuse texts with a reference `${…}`, other than those that the pattern `but` fits."""
    for where, value in nodes(plain, key):
        refers = isinstance(value, str) and "${" in re.sub(but, "", value)
        require(
            not refers, where, f"{value!r} refers to another value", hint="Write the value itself."
        )


def allowed_targets(cfg: DictConfig, overrides: Sequence[str]) -> tuple[str, ...]:
    """The packages that the command line trusts; a file cannot trust any."""
    allowed = cfg.get("allow_targets") or ()
    require(OmegaConf.is_list(allowed) or allowed == (), "allow_targets", "is no list")
    require(
        not allowed or is_set_by_words("allow_targets", overrides),
        "allow_targets",
        "stands in a file",
        hint=ONLY_TYPED,
    )
    return tuple(allowed)


def select_value(cfg: DictConfig, key: str) -> Any:
    """A setting; None if it is missing or not known yet."""
    try:
        return OmegaConf.select(cfg, key)
    except OmegaConfBaseException:
        return None


def may_hold_secrets(words: Sequence[str]) -> bool:
    """Whether typed words hold a secret, or refer to what may be one, such as the environment."""
    return mask_words(words) != list(words) or any("${" in word for word in words)


def is_set_by_words(key: str, overrides: Sequence[str]) -> bool:
    """Whether the command line sets a key, or one below it."""
    names = [re.split(r"[=@]", word.lstrip("+~"), maxsplit=1)[0] for word in overrides]
    return any(name == key or name.startswith(f"{key}.") for name in names)


def is_named_like_a_setting(group: str) -> bool:
    """Whether files lie in a folder that has the name of a setting: `seed`, `data.source`."""
    return "." in group or group in _SETTINGS


def must_be_typed_again(word: str) -> bool:
    """Whether a word that stands in a file sets what only the command line may set.

    The file of a sweep holds its words: such a word is typed again to resume the sweep.
    """
    # Hydra takes backslashes away: `$\{` becomes `${`, and `s3:\//` an address.
    name, _, value = word.lstrip("+~").replace("\\", "").partition("=")
    return _is_only_typed(name) or "${" in value or _ADDRESS.search(value) is not None


def require_typed_again(words: Sequence[str], typed: Sequence[str], where: str) -> None:
    """Refuse words of a run's folder that let something in, unless they are typed beside it.

    The folder may come from others: its words count as typed only where they are harmless.
    """
    missing = [
        word
        for word in words
        if (lets_code_in(word) or must_be_typed_again(word)) and word not in typed
    ]
    require(
        not missing,
        where,
        f"its folder was trained with {' '.join(missing)}",
        hint=f"If that is meant, type it again after it: {shlex.join(missing)}",
    )


def lets_code_in(word: str) -> bool:
    """Whether a word lets code of others in, or is Hydra's own.

    `allow_targets=[mine]`, `hydra.job.chdir=true` and `launcher.setup=[…]` do, `trials=20` and
    `seed=1` do not.
    """
    # as Hydra will get it: `launcher.setup` is short for `hydra.launcher.setup`
    key = key_of(translate_word(word.lstrip("+~")))
    is_folder = key == "--config-dir"  # of files, which are not trusted
    return key.startswith(("allow_targets", "hydra", "-")) and not is_folder


def nodes(value: object, where: str) -> Iterator[tuple[str, object]]:
    """Every part of plain settings with its key, at any depth.

    `{"a": [1]}` gives `{"a": [1]}`, the name `a`, `[1]` under `a`, and 1 under `a[0]`. Names are
    parts too: a sweep makes words of them. A path, which YAML writes by a tag, is given as text.
    """
    yield where, str(value) if isinstance(value, PurePath) else value
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield where, str(key)
            yield from nodes(item, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from nodes(item, f"{where}[{number}]")


def secret_keys(settings: Mapping[Any, Any], words: Sequence[str]) -> list[str]:
    """Keys whose values files may not refer to: secrets, and typed values that hold any.

    A typed value may refer to something, such as the environment, or be an address with a password.
    """
    keys = list(_SECRETS)
    # by the word: a number, a list or a mapping may be secret as a whole
    keys += [_dotted(key_of(word)) for word in words if mask_words([word]) != [word]]
    for key, value in nodes(settings, ""):
        if isinstance(value, str) and "${" in value and is_typed_value(key, value, words):
            keys.append(_dotted(key))
    return keys


def _is_address(text: str) -> bool:
    # Backslashes are left out: they may vanish when the value is read, as in `https:\//`.
    return _ADDRESS.search(text.replace("\\", "")) is not None


def _check_text(key: str, text: str, secrets: Sequence[str]) -> None:
    require(not _is_address(text), key, "an address stands in a file", hint=ONLY_TYPED)
    _check_references(key, text, secrets)


def _check_references(key: str, text: str, secrets: Sequence[str]) -> None:
    # References to other settings and the time are harmless. What is left of `${…}` then calls
    # something: `${oc.env:KEY}`, `${oc.decode:…}`, or one reference inside another.
    rest = _TIME.sub("", _REFERENCE.sub("", text))
    require(
        "${" not in rest,
        key,
        "a file may refer to other settings, not to the environment or to anything else",
        hint=ONLY_TYPED,
    )
    # The value itself is secret, or a group that holds it: `${data}` would copy its secret too. A
    # relative name such as `${.secret}` is refused if anything secret was typed, as it may be it.
    for name in map(_dotted, _REFERENCE.findall(text)):
        is_near = name.startswith(".") and len(secrets) > len(_SECRETS)
        is_secret = is_near or any(f"{name}.".startswith(f"{secret}.") for secret in secrets)
        is_above = any(secret.startswith(f"{name}.") for secret in secrets)
        require(
            not is_secret and not is_above,
            key,
            "a file refers to a value that may be secret",
            hint=ONLY_TYPED,
        )


def _require_none_of_hydra(key: str, text: str) -> None:
    """Refuse references of a run's settings to Hydra's own, which hold typed words and variables.

    No run resolves them, but the name of its folder would.
    """
    names = [_dotted(name).lstrip(".") for name in _REFERENCE.findall(text)]
    require(
        all(name.partition(".")[0] != "hydra" for name in names),
        key,
        "a file refers to a setting of Hydra, whose value may be secret",
        hint="Write the value itself.",
    )


def _check_searched(key: str, text: str) -> None:
    """Refuse words of a sweep in a file that would count as typed in its trials."""
    searched = next(place for place in _SEARCHED if key.startswith(place))
    names = [text, key.removeprefix(searched).removeprefix(".")]
    words = [name.strip().lstrip("+~") for name in names]
    # Hydra's own, too: a trial would lie where `hydra.sweep.dir` says.
    is_own = any(
        _is_only_typed(word) or lets_code_in(word) or key_of(word) in _OF_ONE_RUN for word in words
    )
    require(
        not is_own,
        key,
        "a sweep in a file searches what only the command line may set",
        hint=ONLY_TYPED,
    )
    require(
        "$" not in text, key, "a sweep in a file may not refer to other values", hint=ONLY_TYPED
    )


def _dotted(key: str) -> str:
    """`data.clean[0]` → `data.clean.0`: Hydra takes both forms, secrets are compared in one.

    `[data][clean]` is `data.clean`, and no relative name.
    """
    dotted = re.sub(r"\[(\w+)\]", r".\1", key)
    return dotted.removeprefix(".") if key.startswith("[") else dotted
