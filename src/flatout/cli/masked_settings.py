"""Mask the secrets in the settings that Hydra's own sweepers write beside their trials."""

from __future__ import annotations

from pathlib import Path

import yaml

from flatout.files import write_atomically
from flatout.masking import mask_settings, mask_words


def mask_settings_in(path: Path) -> None:
    """Mask the secrets in a `multirun.yaml`; does nothing where there is none."""
    if not path.is_file():
        return
    settings = mask_settings(yaml.safe_load(path.read_text(encoding="utf-8")))
    overrides = settings["hydra"]["overrides"]
    overrides |= {kind: mask_words(words) for kind, words in overrides.items()}
    of_job = settings["hydra"]["job"]
    of_job["override_dirname"] = ",".join(overrides["task"])
    write_atomically(path, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
