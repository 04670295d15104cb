"""Which classes a file of settings may name, and where their arguments may write.

Hydra imports and calls any class that a `_target_` names. So a name must lie in one of `_PLACES`
before it is imported. The class must be *defined* in such a module, not just visible there, and
must be a part of a run. Classes that open files, write to any folder or talk to a server are
refused. To use one, name it or its package in `allow_targets` on the command line. Open this file
when a class of a trusted package is refused.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from flatout.cli.typed import nodes
from flatout.data.tables.hub import never_ask_to_run_code
from flatout.errors import UserError, require
from flatout.files import is_plain_part, require_inside
from flatout.run.run_folder import require_no_link_outside

TRUSTED_PACKAGES = ("torch", "lightning", "transformers", "torchmetrics", "flatout")
# classes that a run is made of; a `_target_` must be a subclass of one
_KINDS = (
    "torch.nn.Module",
    "torch.optim.Optimizer",
    "torch.optim.lr_scheduler.LRScheduler",
    "torch.utils.data.Dataset",
    "lightning.pytorch.LightningDataModule",
    "lightning.pytorch.callbacks.Callback",
    "lightning.pytorch.loggers.Logger",
    "torchmetrics.Metric",
)
# Modules, with all below them, whose classes a `_target_` may name. Importing one has no effects.
_PLACES = (
    "torch.nn.modules",
    "torch.optim",
    "torch.utils.data.dataset",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.core.module",
    "lightning.pytorch.loggers.csv_logs",
    "lightning.pytorch.loggers.tensorboard",
    "torchmetrics.aggregation",
    "torchmetrics.classification",
    "torchmetrics.clustering",
    "torchmetrics.collections",
    "torchmetrics.metric",
    "torchmetrics.nominal",
    "torchmetrics.regression",
    "torchmetrics.retrieval",
    "torchmetrics.segmentation",
    "torchmetrics.text",
    "torchmetrics.wrappers",
    "transformers.activations",
    "transformers.optimization",
    "flatout.models",
    "flatout.tasks",
    "flatout.callbacks",
)
# Modules by which such classes are usually named; the class must be defined in one of `_PLACES`.
_DOORS = (
    *TRUSTED_PACKAGES,
    "torch.nn",
    "torch.optim.lr_scheduler",
    "torch.utils.data",
    "lightning.pytorch",
    "lightning.pytorch.loggers",
)
# Classes in `_PLACES` that are refused all the same.
_LEFT_OUT = (
    "lightning.pytorch.callbacks.lambda_function.LambdaCallback",  # calls any function
    # these save checkpoints by pickle, and load them
    "lightning.pytorch.callbacks.batch_size_finder.BatchSizeFinder",
    "lightning.pytorch.callbacks.lr_finder.LearningRateFinder",
    # saves in the middle of a step
    "lightning.pytorch.callbacks.on_exception_checkpoint.OnExceptionCheckpoint",
    # these fetch models or lists of words
    "torchmetrics.text.bert.BERTScore",
    "torchmetrics.text.infolm.InfoLM",
    "torchmetrics.text.rouge.ROUGEScore",
    "torchmetrics.text.sacre_bleu.SacreBLEUScore",
)
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
# keys beside the arguments of a `_target_`
_SETTINGS = ("_target_", "_partial_", "_recursive_", "_convert_", "_args_")
_CONVERT = ("none", "partial", "object", "all")
# arguments that name a folder to write to
_FOLDERS = (
    "save_dir",
    "root_dir",
    "dirpath",
    "log_dir",
    "default_root_dir",
    "exclude_batches_path",
    "folder",
)
# arguments that become a part of such a folder
_PARTS = ("name", "version", "sub_dir", "filename", "prefix", "filename_suffix", "comment")
# By a parameter's type, those of the values of a file that fit it.
_PLAIN_TYPES: dict[Any, tuple[type, ...]] = {
    int: (int, float),
    float: (int, float),
    bool: (bool, int),
    str: (str,),
    timedelta: (),
    NoneType: (),
}
_NAMES_OF_TYPES: dict[type, str] = {
    int: "a number",
    float: "a number",
    bool: "true or false",
    str: "a text",
}
# What a file name of ModelCheckpoint may hold of metrics: {epoch}, {val/loss:.2f}. It is a format
# of Python, so any other name in it could look up attributes, or fill with slashes.
_METRIC = re.compile(
    r"\{(?:epoch|step)(?::\d{0,2},?d?)?\}|\{\w[\w/@. -]*(?::\d{0,2},?(?:\.\d{1,2})?[fge%]?)?\}",
    re.ASCII,
)


def check_targets(
    config: Mapping[Any, Any], allowed: Sequence[str], folders: Sequence[Path]
) -> None:
    """Refuse each `_target_` that is not allowed, and arguments that lead out of `folders`."""
    for where, settings in targets(config, ""):
        target = settings["_target_"]
        kind = import_allowed_class(target, where, allowed)
        require(
            not settings.get("_partial_"),
            f"{where}._partial_",
            "makes a function, and a run needs objects",
            hint="Leave it out.",
        )
        # Hydra takes a text for a list of its letters: `_args_: /x` would be two arguments
        is_list = isinstance(settings.get("_args_", []), list)
        require(is_list, f"{where}._args_", repr(settings.get("_args_")), allowed="a list")
        convert = settings.get("_convert_", "none")
        is_known = str(convert).lower() in _CONVERT  # as Hydra compares
        require(is_known, f"{where}._convert_", repr(convert), allowed=", ".join(_CONVERT))
        recursive = settings.get("_recursive_", True)
        is_switch = isinstance(recursive, bool)
        require(is_switch, f"{where}._recursive_", repr(recursive), allowed="true or false")
        if not is_allowed(target, allowed):
            _check_arguments(kind, settings, where, folders)


def targets(value: object, where: str) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Each mapping with a `_target_`, at any depth, and its key."""
    for key, part in nodes(value, where):
        if isinstance(part, Mapping) and "_target_" in part:
            yield key, part


def is_allowed(target: object, allowed: Sequence[str]) -> bool:
    """Whether the command line trusts a name, its module or its package.

    Packages of `TRUSTED_PACKAGES` have the list of this file instead: they cannot be allowed whole.
    """
    is_name = isinstance(target, str) and bool(_NAME.fullmatch(target))
    trusted = (name for name in allowed if name not in TRUSTED_PACKAGES)
    return is_name and any(f"{target}.".startswith(f"{name}.") for name in trusted)


def trust_package(target: str) -> str:
    """A hint that says how to trust the package of a name."""
    package = target.partition(".")[0]
    return f"Trust a package of yours on the command line: +allow_targets=[{package}]."


def import_allowed_class(target: object, where: str, allowed: Sequence[str]) -> type:
    """The class that a `_target_` names; its module is imported only once the name is allowed."""
    if not isinstance(target, str) or not _NAME.fullmatch(target):
        raise UserError(
            where, f"_target_ {target!r} is no name of a class", allowed="package.module.Class"
        )
    is_trusted = is_allowed(target, allowed)
    require(
        is_trusted or target.partition(".")[0] in TRUSTED_PACKAGES,
        where,
        f"_target_ {target} is from a package not trusted",
        allowed=", ".join(TRUSTED_PACKAGES),
        hint=trust_package(target),
    )
    unlisted = f"_target_ {target} is not among the classes that settings may name"
    kinds = "layers, optimizers, metrics, callbacks, two loggers"
    trust = f"If you know what it does, trust it on the command line: +allow_targets=[{target}]."
    module = target.rpartition(".")[0]
    is_listed = is_trusted or module in _DOORS or _is_place(module)
    require(is_listed, where, unlisted, allowed=kinds, hint=trust)
    kind = _import_object(target)
    never_ask_to_run_code()  # transformers may just have been imported
    hint = "Check the spelling, and that its package is installed."
    require(kind is not None, where, f"_target_ {target}: there is no such class", hint=hint)
    if not (isinstance(kind, type) and issubclass(kind, tuple(map(_import_object, _KINDS)))):
        names = ", ".join(name.rpartition(".")[2] for name in _KINDS)
        raise UserError(
            where, f"_target_ {target} is no class of a kind a run is made of", allowed=names
        )
    # A door may show a class of another module, and a subclass may do what its base is refused for.
    names_of_bases = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    is_left_out = any(name in _LEFT_OUT for name in names_of_bases)
    is_listed = is_trusted or (_is_place(kind.__module__) and not is_left_out)
    require(is_listed, where, unlisted, allowed=kinds, hint=trust)
    return kind


def _is_place(module: str) -> bool:
    return any(f"{module}.".startswith(f"{place}.") for place in _PLACES)


def _import_object(target: str) -> Any:
    """The object of a dotted name; None if there is none."""
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, ValueError, AttributeError):
        return None


def _check_arguments(
    kind: type, settings: Mapping[Any, Any], where: str, folders: Sequence[Path]
) -> None:
    """Refuse arguments, positional ones too, that lead out of the folder of all runs."""
    arguments = {str(key): value for key, value in settings.items() if key not in _SETTINGS}
    # by getattr: a type checker holds `kind.__init__` to be unsafe on an instance
    constructor = getattr(kind, "__init__")  # noqa: B009
    parameters = inspect.signature(constructor).parameters
    arguments |= dict(zip(list(parameters)[1:], settings.get("_args_", []), strict=False))
    _check_parts(arguments, where)
    _check_types(arguments, parameters, where)
    default = parameters["name"].default if "name" in parameters else ""
    part = arguments.get("name", default)
    for name in _FOLDERS:
        if (folder := arguments.get(name)) is not None:
            require_inside(str(folder), folders, f"{where}.{name}")
            _require_no_expansion(str(folder), f"{where}.{name}")
            # A logger joins its `name`; all else of a run lies below that, at any depth.
            written_to = Path(str(folder)) / (part if isinstance(part, str) else "")
            require_inside(str(written_to), folders, f"{where}.name")
            require_no_link_outside(written_to)


def _check_parts(arguments: Mapping[str, Any], where: str) -> None:
    """Refuse arguments that become a part of a path and hold more than a name."""
    for name in _PARTS:
        value = arguments.get(name)
        if value is None or (name == "version" and isinstance(value, int | float)):
            continue
        # a list would be written out, with all of its slashes
        is_text = isinstance(value, str)
        rest = _METRIC.sub("", str(value)) if name == "filename" else str(value)
        is_part = is_text and (not value or is_plain_part(str(value)))
        require(
            is_part and "{" not in rest and "}" not in rest,
            f"{where}.{name}",
            repr(value),
            allowed="a name without '..' that begins with no '/' or '~'; braces hold a metric"
            " and its format, in the filename of a checkpoint only: {epoch}, {val/loss:.2f}",
        )
        _require_no_expansion(str(value), f"{where}.{name}")


def _check_types(
    arguments: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], where: str
) -> None:
    """Refuse a value where a class wants another type: it would fail in mid-training.

    A part of its own, such as a layer where a function is wanted, stays.
    """
    for name, value in arguments.items():
        if value is None or isinstance(value, Mapping):
            continue
        # a class may hand on what it does not name itself
        types: tuple[type, ...] | None = () if name.endswith("_fn") else None
        if name in parameters:
            types = _types_of(parameters[name].annotation)
        wanted = dict.fromkeys(_NAMES_OF_TYPES[kind] for kind in types or ())
        require(
            types is None or isinstance(value, types),
            f"{where}.{name}",
            f"{value!r}, and {' or '.join(wanted) or 'a function or an object'} is wanted there",
            hint="Leave it out, or write a class of your own with it.",
        )


def _types_of(annotation: object) -> tuple[type, ...] | None:
    """The types of plain values that fit a parameter; None where anything may fit.

    `Optional[int]` gives numbers. Of functions and spans of time a file can hold none.
    """
    is_union = get_origin(annotation) in (Union, UnionType)
    kinds = get_args(annotation) if is_union else (annotation,)
    types: tuple[type, ...] = ()
    for kind in kinds:
        if kind in _PLAIN_TYPES:
            types += _PLAIN_TYPES[kind]
        elif Callable not in (kind, get_origin(kind)):
            return None
    return types


def _require_no_expansion(text: str, where: str) -> None:
    """Refuse a `$`: TensorBoard's logger puts variables of the environment in its place."""
    require("$" not in text, where, repr(text), hint="Write the name itself, without '$'.")
