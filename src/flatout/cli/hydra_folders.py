"""Where files of settings may let a run, a sweep and Hydra write: below the folder of all runs.

What is typed may lie anywhere. A folder that a file names lies below `output`, holds no links, and
has a plain name. Hydra writes into these folders before a run begins, so they are checked as soon
as settings are composed. Open this file when settings name one more folder.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from flatout.cli.typed import ONLY_TYPED, is_set_by_words, nodes, select_value
from flatout.config import NAMES, RunConfig
from flatout.errors import require
from flatout.files import is_plain_part, require_inside
from flatout.run.run_folder import require_no_link_outside
from flatout.sweep.settings import LauncherSettings

# Others keep their results as pickles, or start programs.
_PLAIN_LAUNCHERS = (
    LauncherSettings._target_,
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
)


def check_folders(cfg: DictConfig, overrides: Sequence[str], *, is_trial: bool) -> None:
    """A typed folder may lie anywhere; a folder from a file must lie below `output`."""
    numbered = cfg.copy()
    with open_dict(numbered):
        for name in ("num", "id"):  # Hydra fills these when a trial begins
            if OmegaConf.is_missing(numbered.hydra.job, name):
                numbered.hydra.job[name] = 0
    name = select_value(numbered, "name")
    if isinstance(name, str):
        require(is_plain_part(name), "name", repr(name), allowed=NAMES)
        if not is_set_by_words("name", overrides):
            _require_plain_folder(name, "name")
    output = Path(str(select_value(numbered, "output")))
    if not is_set_by_words("output", overrides):
        _check_output(output)
    for key in ("hydra.run.dir", "hydra.sweep.dir"):
        folder = str(select_value(numbered, key))
        require(folder.isprintable(), key, repr(folder), allowed="a folder")
        if not is_set_by_words(key, overrides):
            _check_folder_of_runs(folder, key, output)
            if not is_trial:
                require_files_of_its_own(Path(folder))
    sweep = Path(str(select_value(numbered, "hydra.sweep.dir")))
    if not is_trial:
        _require_plain_launcher(numbered, sweep, overrides)
    _check_launcher(numbered, sweep, overrides)
    for key in ("hydra.sweep.subdir", "hydra.output_subdir", "hydra.job.name"):
        part = select_value(numbered, key)
        require(
            part is None or is_plain_part(str(part)),
            key,
            repr(part),
            allowed="a name below the run folder",
        )
        if part is not None and not is_set_by_words(key, overrides):
            _require_plain_folder(str(part), key)
    # A time that was asked for here stays what it is where Hydra asks again.
    OmegaConf.copy_cache(from_config=numbered, to_config=cfg)


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


def require_files_of_its_own(folder: Path) -> None:
    """Refuse a folder with files that are other files, too: what is written there would be in both.

    Hydra writes its settings and logs before a run looks at its folder.
    """
    require_no_link_outside(folder)
    for path in folder.rglob("*"):
        require(
            not path.is_file() or path.lstat().st_nlink == 1,
            str(path),
            "is a file that has another name, too",
            hint="Remove it, or copy the folder: cp -r gives each file one name.",
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
    launcher = select_value(cfg, "hydra.launcher._target_")
    if launcher in _PLAIN_LAUNCHERS:
        return
    require(
        is_set_by_words("hydra/launcher", overrides),
        "hydra/launcher",
        f"{launcher} stands in a file",
        hint=ONLY_TYPED,
    )
    require(
        is_set_by_words("hydra.sweep.dir", overrides) or not sweep.exists(),
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
        if not isinstance(text, str) or is_set_by_words(key, overrides):
            continue
        value = select_value(cfg, key) if "${" in text else text
        is_line = isinstance(value, str) and value.isprintable()
        require(is_line, key, repr(value), allowed="a text of one line", hint=ONLY_TYPED)
        if key.endswith("folder"):
            require_inside(
                str(value), [sweep], key, "Begin it with ${hydra.sweep.dir}/.", of="the sweep"
            )
