"""`python -m train`: compose the settings and train one run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.cli.start import leave, start_hydra
from flatout.errors import UserError

if TYPE_CHECKING:  # imported later, while the command answers Ctrl-C
    from omegaconf import DictConfig


def job(cfg: DictConfig) -> float | None:
    """One run of the composed settings."""
    from hydra.core.hydra_config import HydraConfig

    from flatout.cli.boundary import as_typed, read_config

    described = HydraConfig.get()
    folder, overrides = Path(described.runtime.output_dir), as_typed(described.overrides.task)
    is_shared = any(word.startswith("hydra.run.dir=") for word in described.overrides.hydra)
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0" and not is_shared:
        _remove_empty(folder)  # all ranks write to the folder of the first
    try:
        config = read_config(cfg, overrides)
        from flatout.run.launch import start
        from flatout.run.run_folder import claim_folder, claim_named_folder

        claim = claim_named_folder if is_shared else claim_folder
        result = start(config, folder=folder, overrides=overrides, claim=claim)
        if result.folder != folder.absolute():
            _remove_empty(folder)  # Hydra made it, but the run resumed another one
        return result.objective
    except UserError as mistake:
        _remove_empty(folder)
        leave(mistake)
    except BaseException:
        _remove_empty(folder)
        raise


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    start_hydra(sys.argv[1:] if arguments is None else arguments, job)
