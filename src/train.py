"""`python -m train`: find `conf/`, compose the settings, train, and print the result.

Only this file, `flatout/cli/` and the Hydra plugin import Hydra. Below `run` there are plain dataclasses.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import flatout
from flatout.cli.interrupts import leaving_at_once
from flatout.errors import EXIT_CODE, RunBroke, UserError, out_of_space, require, write_for_launcher

if TYPE_CHECKING:  # `main` imports all heavy modules, because it answers Ctrl-C while it imports
    from omegaconf import DictConfig

_ADDED = ("experiment", "sweep", "debug")
"""Groups outside the defaults list of train.yaml: Hydra asks for a plus sign, we take both forms."""
_LISTED = ("data", "model", "task", "optim", "checkpoint", "monitor", "trainer", "logger", "callbacks", "tune")
"""Groups in the defaults list: Hydra refuses a plus sign, we take both forms."""


def conf_folder() -> Path:
    """`$FLATOUT_CONF`, else `conf/` beside the checkout's `src/`, else the copy inside the installed package."""
    given = os.environ.get("FLATOUT_CONF")
    package = Path(flatout.__file__).parent
    places = [Path(given)] if given else [package.parents[1] / "conf", package / "conf"]
    for place in places:
        if (place / "train.yaml").is_file():
            return place.resolve()
    raise UserError(
        "FLATOUT_CONF",
        f"no train.yaml in {', '.join(map(str, places))}",
        hint="Set FLATOUT_CONF to a folder with train.yaml, or leave it out.",
    )


@cache
def register_schemas() -> None:
    """Make every settings class a Hydra schema: a wrong key or type then fails while composing."""
    from hydra.core.config_store import ConfigStore

    from flatout.callbacks.loggers import LOGGERS
    from flatout.config import COMPONENTS, RunConfig

    store = ConfigStore.instance()
    store.store(group="schema", name="run", node=RunConfig)
    for group, classes in {**COMPONENTS, "logger": LOGGERS}.items():
        for name, settings in classes.items():
            store.store(group=f"schema/{group.rpartition('.')[2]}", name=name, node=settings)


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
        from flatout.run.build import RunBuilder
        from flatout.run.launch import start

        result = start(RunBuilder(config), folder=folder, overrides=overrides)
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


def main(arguments: Sequence[str] | None = None, job: Callable[[DictConfig], Any] = job) -> None:
    """Entry point. A user's mistake ends with one message and exit code 2."""
    if arguments is not None:
        sys.argv[1:] = arguments
    sys.argv[1:] = options_last(debug_last(map(in_hydras_form, with_own_parts(sys.argv[1:]))))
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors whole, and prints none
    try:
        with leaving_at_once():
            _import_all(sys.argv[1:])
        _start(job)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except RunBroke as broken:
        write_for_launcher(broken)
        print(broken, file=sys.stderr)
        sys.exit(1)
    except UserError as mistake:
        leave(mistake)


def _import_all(words: Sequence[str]) -> None:
    from flatout.distributed.processes import warm_start
    from flatout.engine.torchmetrics_internals import import_torchmetrics

    if any(word in ("-m", "--multirun", "tune=auto") or "trainer.devices=" in word for word in words):
        warm_start()  # imports in the background what later processes need
    import_torchmetrics()
    importlib.import_module("flatout.cli.boundary")


def _start(job: Callable[[DictConfig], Any]) -> None:
    """Let Hydra compose the settings and run the job; explain its errors."""
    import hydra

    from flatout.cli.composing import explain_errors
    from flatout.cli.hydra_internals import guard_hydra
    from flatout.files import REFUSALS, refused_folder

    try:
        with explain_errors():
            guard_hydra()
            refuse_pickles_and_packages(sys.argv[1:])
            register_schemas()
            if any(word in ("-h", "--help") for word in sys.argv[1:]):
                from flatout.cli.train_help import help_text

                print(help_text(sys.argv[1:], conf_folder()))
                return
            hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="train")(job)()
    except OSError as error:
        if error.errno not in (*REFUSALS, errno.EACCES, errno.EPERM):
            names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            if "mkdir" not in names or job.__name__ in names:
                raise
            raise refused_folder(error, Path(error.filename or ".")) from None
        hint = "Set output=FOLDER to a writable folder."
        raise out_of_space(error, Path(error.filename or "."), None, "output", hint) from None


def in_hydras_form(word: str) -> str:
    """A word of our command line in the form that Hydra asks for."""
    if word.startswith("launcher."):
        return f"hydra.{word}"
    group, equals, option = word.removeprefix("+").partition("=")
    if equals and group in _ADDED:
        return f"+{group}={option}"
    return f"{group}={option}" if equals and group in _LISTED else word


def with_own_parts(words: Sequence[str]) -> list[str]:
    """The words without the option of a group whose `_target_` is typed: a class of yours takes its place."""
    found = list(words)
    for group in ("data", "task"):
        plain = [word.lstrip("+") for word in found]
        if any(word.startswith(f"{group}._target_=") for word in plain):
            named = [f"+{word}" if word.startswith(f"{group}.") else word for word in plain]
            kept = [word if new == old else new for word, old, new in zip(found, plain, named, strict=True)]
            found = [f"~{group}", *(word for word in kept if not word.startswith(f"{group}="))]
    return found


def debug_last(words: Iterable[str]) -> list[str]:
    """The words in their order, but `+debug=` at the end: Hydra composes in order, and debug overrides all files."""
    return sorted(words, key=lambda word: word.startswith("+debug="))


def options_last(words: Sequence[str]) -> list[str]:
    """Settings first, then options: Hydra's parser takes settings in one piece only."""
    if "--" in words:
        return list(words)
    settings, options, waiting = [], [], list(words)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("-"):
            settings.append(word)
            continue
        options.append(word)
        if waiting and _takes_value(word, waiting[0]):
            options.append(waiting.pop(0))
    return [*settings, *options]


def _takes_value(option: str, following: str) -> bool:
    """Whether the word behind an option is its value."""
    if option in ("-i", "--info"):
        return following in ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
    names = ("--package", "--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--cfg")
    is_beginning = len(option) > len("--") and any(name.startswith(option) for name in names)  # argparse takes them too
    return is_beginning or option in ("-p", "-cp", "-cn", "-cd", "-c")


def refuse_pickles_and_packages(words: Sequence[str]) -> None:
    """Refuse two options of Hydra: one unpickles a file, one may import a package to read settings."""
    from flatout.cli.boundary import require_folders

    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        is_rerun = len(name) > len("--e") and "--experimental-rerun".startswith(name)  # argparse takes beginnings too
        require(not is_rerun, "--experimental-rerun", "reads a pickle", hint="Type the run's overrides.txt again.")
        is_path = name == "-cp" or (len(name) > len("--config-") and "--config-path".startswith(name))
        if word.startswith("-cp") or is_path:
            require_folders("--config-path", " ".join([value or word, *words[number + 1 : number + 2]]))


def leave(mistake: UserError) -> NoReturn:
    write_for_launcher(mistake)  # torchrun then shows the mistake on its own last page
    print(mistake, file=sys.stderr)
    sys.exit(EXIT_CODE)


if __name__ == "__main__":
    main()
