"""The boundary: Hydra's settings go in, dataclasses come out.

Settings may come from other people, and Hydra imports and calls any class that a `_target_` names.
So `targets.py` lists which classes are allowed, and `typed.py` which values the command line alone
may set. Here both are applied before dataclasses are made.

Hydra also acts on its own settings before it runs a job: it imports what `hydra.searchpath` names,
and calls what callbacks, plugins and logging name. `hydra_check.py` looks at those first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning import seed_everything
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flatout.cli.composing import (
    chain_of,
    explain_errors,
    mistake_in,
    unknown_key,
    without_value,
)
from flatout.cli.own_classes import hold_optimizer, hold_task
from flatout.cli.targets import check_targets, import_allowed_class
from flatout.cli.typed import (
    allowed_targets,
    check_resolved,
    check_values,
    is_set_by_words,
    refuse_references,
)
from flatout.config import RunConfig
from flatout.errors import UserError
from flatout.files import require_inside


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
    refuse_references(plain, "")
    check_resolved(written, plain, overrides)
    folders = [Path(cfg.output)]
    if HydraConfig.initialized():
        runtime = HydraConfig.get().runtime
        if not OmegaConf.is_missing(runtime, "output_dir"):
            folders.append(Path(runtime.output_dir))
    if cfg.resume not in (None, "auto") and not is_set_by_words("resume", overrides):
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
