"""The classes that a `_target_` may name: parts of a run, from known modules or from packages that you trust.

Settings may come from other people, and Hydra imports and calls any class that a `_target_` names. So this file lists
what is allowed, and refuses the rest. A name must lie in one of `_PLACES` before we import it. The class must be
*defined* in such a module, not just visible there, and must be a part of a run. Classes that open files, write to any
folder or talk to a server are refused. To use one, name it or its package in `allow_targets` on the command line.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.errors import UserError, require
from flatout.files import is_plain_part, require_inside

TRUSTED_PACKAGES = ("torch", "lightning", "transformers", "torchmetrics", "flatout")
_KINDS = (
    *("torch.nn.Module", "torch.optim.Optimizer", "torch.optim.lr_scheduler.LRScheduler", "torch.utils.data.Dataset"),
    *("lightning.pytorch.LightningDataModule", "lightning.pytorch.callbacks.Callback"),
    *("lightning.pytorch.loggers.Logger", "torchmetrics.Metric"),
)
_PLACES = (
    *("torch.nn.modules", "torch.optim", "torch.utils.data.dataset"),
    *("lightning.pytorch.callbacks", "lightning.pytorch.core.module"),
    *("lightning.pytorch.loggers.csv_logs", "lightning.pytorch.loggers.tensorboard"),
    *("torchmetrics.aggregation", "torchmetrics.classification", "torchmetrics.clustering", "torchmetrics.collections"),
    *("torchmetrics.metric", "torchmetrics.nominal", "torchmetrics.regression", "torchmetrics.retrieval"),
    *("torchmetrics.segmentation", "torchmetrics.text", "torchmetrics.wrappers"),
    *("transformers.activations", "transformers.optimization", "transformers.models"),
    *("flatout.models", "flatout.tasks", "flatout.callbacks"),
)
"""Modules, with all below them, whose classes a `_target_` may name. Importing one has no effects."""
_DOORS = (
    *TRUSTED_PACKAGES,
    *("torch.nn", "torch.optim.lr_scheduler", "torch.utils.data", "lightning.pytorch", "lightning.pytorch.loggers"),
)
"""Modules that usually re-export such classes; the class itself must be defined in one of `_PLACES`."""
_LEFT_OUT = (
    "lightning.pytorch.callbacks.lambda_function.LambdaCallback",  # calls any function
    "lightning.pytorch.callbacks.on_exception_checkpoint.OnExceptionCheckpoint",  # saves in the middle of a step
    "torchmetrics.text.bert.BERTScore",  # these fetch models or lists of words
    "torchmetrics.text.infolm.InfoLM",
    "torchmetrics.text.rouge.ROUGEScore",
    "torchmetrics.text.sacre_bleu.SacreBLEUScore",
)
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
_SETTINGS = ("_target_", "_partial_", "_recursive_", "_convert_", "_args_")
_FOLDERS = ("save_dir", "root_dir", "dirpath", "log_dir", "default_root_dir", "exclude_batches_path")
"""Arguments that name a folder to write to."""
_PARTS = ("name", "version", "sub_dir", "filename", "prefix", "filename_suffix", "comment")
"""Arguments that become a part of such a folder."""


def check_targets(config: Mapping[Any, Any], allowed: Sequence[str], folders: Sequence[Path]) -> None:
    """Refuse each `_target_` that is not allowed, and arguments that lead out of `folders`."""
    for place, settings in targets(config, ""):
        found = _part_of_a_run(settings["_target_"], place, allowed)
        what = "makes a function, and a run needs objects"
        require(not settings.get("_partial_"), f"{place}._partial_", what, hint="Leave it out.")
        if not is_allowed(settings["_target_"], allowed):
            _check_arguments(found, settings, place, folders)


def targets(value: Any, where: str) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Each mapping with a `_target_`, at any depth, and its key."""
    return ((key, each) for key, each in nodes(value, where) if isinstance(each, Mapping) and "_target_" in each)


def nodes(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Every part of plain settings, at any depth, and its key; the names in a mapping are parts of it, too."""
    yield where, value
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield where, str(key)
            yield from nodes(item, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from nodes(item, f"{where}[{number}]")


def is_allowed(target: Any, allowed: Sequence[str]) -> bool:
    """Whether `allowed` holds its name, or the name of its module or package."""
    is_name = isinstance(target, str) and bool(_NAME.fullmatch(target))
    return is_name and any(f"{target}.".startswith(f"{each}.") for each in allowed if each not in TRUSTED_PACKAGES)


def _part_of_a_run(target: Any, where: str, allowed: Sequence[str]) -> type:
    if not isinstance(target, str) or not _NAME.fullmatch(target):
        raise UserError(where, f"_target_ {target!r} is no name of a class", allowed="package.module.Class")
    is_trusted, (package, module) = is_allowed(target, allowed), (target.partition(".")[0], target.rpartition(".")[0])
    hint = f"Trust a package of yours on the command line: +allow_targets=[{package}]."
    what, known = f"_target_ {target} is from a package not trusted", ", ".join(TRUSTED_PACKAGES)
    require(is_trusted or package in TRUSTED_PACKAGES, where, what, allowed=known, hint=hint)
    if not is_trusted and module not in _DOORS and not _is_place(module):
        raise _not_listed(target, where)
    found, hint = _found(target), "Check the spelling, and that its package is installed."
    require(found is not None, where, f"_target_ {target}: there is no such class", hint=hint)
    if not (isinstance(found, type) and issubclass(found, tuple(map(_found, _KINDS)))):
        names = ", ".join(kind.rpartition(".")[2] for kind in _KINDS)
        raise UserError(where, f"_target_ {target} is no class of a kind a run is made of", allowed=names)
    is_left_out = any(f"{each.__module__}.{each.__qualname__}" in _LEFT_OUT for each in found.__mro__)
    if not is_trusted and (is_left_out or not _is_place(found.__module__)):
        raise _not_listed(target, where)
    return found


def _is_place(module: str) -> bool:
    is_script = module.startswith("transformers.models.") and ".modeling_" not in module
    return any(f"{module}.".startswith(f"{place}.") for place in _PLACES) and not is_script


def _not_listed(target: str, where: str) -> UserError:
    what = f"_target_ {target} is not among the classes that settings may name"
    hint = f"If you know what it does, trust it on the command line: +allow_targets=[{target}]."
    return UserError(where, what, allowed="layers, optimizers, metrics, callbacks, two loggers", hint=hint)


def _found(target: str) -> Any:
    """The object of a name, from its imported module; None where there is none."""
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError, AttributeError):
        return None


def _check_arguments(found: type, settings: Mapping[Any, Any], where: str, folders: Sequence[Path]) -> None:
    """Refuse arguments, positional ones too, that lead out of the folder of all runs."""
    given = {str(key): value for key, value in settings.items() if key not in _SETTINGS}
    places = settings.get("_args_") or []
    if isinstance(places, list | tuple):
        names = list(inspect.signature(getattr(found, "__init__")).parameters)[1:]  # noqa: B009 (of any class)
        given |= dict(zip(names, places, strict=False))
    for name, value in given.items():
        if name in _FOLDERS and value is not None:
            require_inside(str(value), folders, f"{where}.{name}")
        elif name in _PARTS and isinstance(value, str):
            allowed = "a name without '..' that begins with no '/' or '~'"
            require(not value or is_plain_part(value), f"{where}.{name}", repr(value), allowed=allowed)
