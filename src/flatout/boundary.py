"""The boundary: what goes in is Hydra's, what comes out are dataclasses."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from flatout.compose import check_targets
from flatout.config import RunConfig
from flatout.errors import UserError


def read_config(cfg: DictConfig, overrides: Sequence[str]) -> RunConfig:
    """One run's settings, from what was composed and what was typed."""
    if missing := OmegaConf.missing_keys(cfg):
        key = sorted(missing)[0]
        raise UserError(key, "has no value", mend=f"Give it one: {key}=VALUE.")
    said = any(override.lstrip("+").startswith("allow_targets=") for override in overrides)
    if cfg.allow_targets and not said:
        raise UserError("allow_targets", "stands in a file", mend="Packages are trusted on the command line only.")
    check_targets(cfg, tuple(cfg.allow_targets))
    return instantiate(cfg, _convert_="object")
