"""`python -m train`: find `conf/`, compose the settings, train, and say what came out.

Hydra lives here and nowhere else: below `run` there are only dataclasses.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import flatout
from flatout.cli.interrupts import leaving_at_once
from flatout.errors import EXIT_CODE, RunBroke, UserError, out_of_space, require, write_for_launcher

if TYPE_CHECKING:  # all that is heavy is imported inside of `main`, where Ctrl-C is answered
    from omegaconf import DictConfig


def conf_folder() -> Path:
    """`$FLATOUT_CONF`, else `conf/` beside the checkout's `src/`, else the copy inside the installed package."""
    given = os.environ.get("FLATOUT_CONF")
    package = Path(flatout.__file__).parent
    places = [Path(given)] if given else [package.parents[1] / "conf", package / "conf"]
    for place in places:
        if (place / "train.yaml").is_file():
            return place.resolve()
    raise UserError("FLATOUT_CONF", f"no train.yaml in {', '.join(map(str, places))}")


def register_schemas() -> None:
    """Make every settings class a Hydra schema, so that a wrong key or type fails while composing."""
    from hydra.core.config_store import ConfigStore

    from flatout.callbacks.loggers import LOGGERS
    from flatout.config import COMPONENTS, RunConfig

    store = ConfigStore.instance()
    store.store(group="schema", name="run", node=RunConfig)
    for group, classes in {**COMPONENTS, "logger": LOGGERS}.items():
        for name, settings in classes.items():
            store.store(group=f"schema/{group}", name=name, node=settings)


def job(cfg: DictConfig) -> float | None:
    """One run of the composed settings."""
    from hydra.core.hydra_config import HydraConfig

    from flatout.cli.boundary import as_typed, read_config

    described = HydraConfig.get()
    folder, overrides = Path(described.runtime.output_dir), as_typed(described.overrides.task)
    is_shared = any(word.startswith("hydra.run.dir=") for word in described.overrides.hydra)
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0" and not is_shared:
        _remove_empty(folder)  # Hydra made it, but the first rank's folder is that of all
    try:
        config = read_config(cfg, overrides)
        from flatout.run.launch import start

        result = start(config, folder=folder, overrides=overrides)
        if result.folder != folder.absolute():
            _remove_empty(folder)  # Hydra made it, but another run was gone on with
        return result.objective
    except UserError as mistake:
        _remove_empty(folder)
        leave(mistake)
    except BaseException:
        _remove_empty(folder)
        raise


def tune_job(cfg: DictConfig) -> None:
    """What a run of the composed settings would measure before it trains, and no more."""
    from hydra.core.hydra_config import HydraConfig

    from flatout.cli.boundary import as_typed, read_config

    overrides = as_typed(HydraConfig.get().overrides.task)
    try:
        from flatout.cli.tune import decide

        decide(read_config(cfg, overrides), overrides)
    except UserError as mistake:
        leave(mistake)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def main(arguments: Sequence[str] | None = None, job: Callable[[DictConfig], Any] = job) -> None:
    """Entry point; a person's mistake ends with one message and exit code 2."""
    if arguments is not None:
        sys.argv[1:] = arguments
    sys.argv[1:] = options_last([as_hydra_knows_it(word) for word in sys.argv[1:]])
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us whole instead of being printed and swallowed
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
    from flatout.engine.torchmetrics_internals import defer_pyplot

    if any(word in ("-m", "--multirun", "tune=auto") or "trainer.devices=" in word for word in words):
        warm_start()  # it imports beside us what the processes to come will need
    defer_pyplot()
    importlib.import_module("flatout.cli.boundary")


def _start(job: Callable[[DictConfig], Any]) -> None:
    """Let Hydra compose the settings and run the job, and say what it complains of in our words."""
    import hydra

    from flatout.cli.boundary import guard_hydra
    from flatout.cli.composing import told_plainly
    from flatout.files import REFUSALS, refused_folder

    try:
        with told_plainly(conf_folder()):
            guard_hydra()
            refuse_pickles_and_packages(sys.argv[1:])
            register_schemas()
            hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="train")(job)()
    except OSError as error:
        if error.errno not in (*REFUSALS, errno.EACCES, errno.EPERM):
            names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            if "mkdir" not in names or job.__name__ in names:
                raise
            raise refused_folder(error, Path(error.filename or ".")) from None
        mend = "Set output=FOLDER to one that can be written."
        raise out_of_space(error, Path(error.filename or "."), None, "output", mend) from None


def as_hydra_knows_it(word: str) -> str:
    """A word of our command line in Hydra's words."""
    if word.startswith("launcher."):
        return f"hydra.{word}"
    # `monitor: default` is in the list already, so Hydra wants monitor=profile; +monitor=profile is the same. Tune too.
    return word[1:] if word.startswith(("+monitor=", "+tune=")) else word


def options_last(words: Sequence[str]) -> list[str]:
    """Settings first, then what begins with a dash: Hydra's parser takes settings in one piece only."""
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
    """Whether the word behind an option belongs to it."""
    if option in ("-i", "--info"):
        return following in ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
    names = ("--package", "--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--cfg")
    is_beginning = len(option) > len("--") and any(name.startswith(option) for name in names)  # argparse takes them too
    return is_beginning or option in ("-p", "-cp", "-cn", "-cd", "-c")


def refuse_pickles_and_packages(words: Sequence[str]) -> None:
    """Two options of Hydra's own: one unpickles a file, one may import a package to look for settings in it."""
    from flatout.cli.boundary import require_folders

    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        is_rerun = len(name) > len("--e") and "--experimental-rerun".startswith(name)  # argparse takes beginnings too
        require(not is_rerun, "--experimental-rerun", "reads a pickle", mend="Type the run's overrides.txt again.")
        is_path = name == "-cp" or (len(name) > len("--config-") and "--config-path".startswith(name))
        if word.startswith("-cp") or is_path:
            require_folders("--config-path", " ".join([value or word, *words[number + 1 : number + 2]]))


def leave(mistake: UserError) -> NoReturn:
    write_for_launcher(mistake)  # torchrun ends with a page of its own: the mistake stands in it too
    print(mistake, file=sys.stderr)
    sys.exit(EXIT_CODE)


if __name__ == "__main__":
    main()
