"""`python -m train`: compose the settings and train one run.

`start_hydra` composes settings for any job. Commands that measure go through `start_measuring`,
which gives them the settings and no run folder. Heavy modules are imported inside functions: the
command answers Ctrl-C while it imports.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flatout.cli.kept_help import read_help
from flatout.cli.words import (
    conf_folder,
    conf_words,
    refuse_forbidden_options,
    refuse_two_sizes,
    translate_command,
)
from flatout.distributed.engine import Place
from flatout.distributed.imports import importing
from flatout.distributed.processes import warm_start
from flatout.errors import (
    EXIT_CODE,
    REFUSALS,
    RunBroke,
    UserError,
    out_of_space,
    require,
    write_for_launcher,
)
from flatout.run_log import print_line

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from flatout.config import RunConfig


@cache
def register_schemas() -> None:
    """Make every settings class a Hydra schema: a wrong key or type then fails while composing."""
    from hydra.core.config_store import ConfigStore

    from flatout.callbacks.loggers import LOGGERS
    from flatout.cli.composing import COMPONENTS
    from flatout.config import RunConfig

    store = ConfigStore.instance()
    store.store(group="schema", name="run", node=RunConfig)
    for group, classes in {**COMPONENTS, "logger": LOGGERS}.items():
        for name, settings in classes.items():
            store.store(group=f"schema/{group.rpartition('.')[2]}", name=name, node=settings)


def start_hydra(words: Sequence[str], job: Callable[[DictConfig], Any]) -> None:
    """Run a job on the settings that words describe.

    A user's mistake ends with one message and exit code 2.
    """
    sys.argv[1:] = typed = translate_command(words)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors whole, and prints none
    try:
        kept = read_help(typed, conf_folder())
        if kept is not None:
            print_line(kept)
            return
        with importing():
            if any(map(_needs_processes, typed)):
                warm_start()  # imports in the background what later processes need
            importlib.import_module("flatout.cli.boundary")
        _compose(words, typed, job)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except RunBroke as broken:
        write_for_launcher(broken)
        print(broken, file=sys.stderr)
        sys.exit(1)
    except UserError as mistake:
        leave(mistake)


def add_words(parser: argparse.ArgumentParser) -> None:
    """Let a command take the words of a training."""
    parser.add_argument(
        "words",
        metavar="WORD",
        nargs="*",
        help="+experiment=NAME and any key=value, as for training",
    )


def _needs_processes(word: str) -> bool:
    """Whether a word asks for several runs, measured settings, or ranks on this machine."""
    is_measured = word in ("-m", "--multirun", "tune=auto") or word.startswith("budget=")
    return is_measured or "trainer.devices=" in word


def start_measuring(words: Sequence[str], measure: Callable[[RunConfig, list[str]], None]) -> None:
    """Call `measure` with the settings that words describe; no run is trained or gets a folder."""

    def job(cfg: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig

        from flatout.cli.boundary import read_config
        from flatout.cli.typed import words_as_entered

        overrides = words_as_entered(HydraConfig.get().overrides.task)
        try:
            is_here = workers_of_ray(HydraConfig.get().launcher) is None
            require(
                is_here,
                "on",
                "ray, and this command works here",
                hint="Leave it out; build takes --on ray.",
            )
            measure(read_config(cfg, overrides), overrides)
        except UserError as mistake:
            leave(mistake)

    with tempfile.TemporaryDirectory() as folder:  # Hydra wants one; nothing is written there
        start_hydra([*words, f"hydra.run.dir={folder}/none"], job)


def _compose(words: Sequence[str], typed: Sequence[str], job: Callable[[DictConfig], Any]) -> None:
    """Let Hydra compose `typed`, which are `words` in its form, and run the job."""
    import hydra

    from flatout.cli.composing import explain_errors
    from flatout.cli.hydra_internals import guard_hydra, refuse_options
    from flatout.files import refused_folder

    try:
        with explain_errors():
            guard_hydra()
            refuse_two_sizes(words)
            refuse_forbidden_options(typed)
            refuse_options(typed, words)
            register_schemas()
            if any(word in ("-h", "--help") for word in typed):
                from flatout.cli.settings import help_text

                print_line(help_text(typed, conf_folder()))
                return
            hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="train")(
                job
            )()
    except OSError as error:
        if error.errno not in (*REFUSALS, errno.EACCES, errno.EPERM):
            # Hydra makes the run folder before it calls the job. Only an error of that moment is
            # about the folder; one inside the job keeps its traceback.
            names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            if "mkdir" not in names or job.__name__ in names:
                raise
            raise refused_folder(error, Path(error.filename or ".")) from None
        hint = "Set output=FOLDER to a writable folder."
        place = Path(error.filename or _output_of(words))
        raise out_of_space(error, place, None, "output", hint) from None


def _output_of(words: Sequence[str]) -> str:
    """The folder that was asked for with `output=`; a write of Hydra does not name its file."""
    from flatout.config import RunConfig

    asked = [word.removeprefix("output=") for word in words if word.startswith("output=")]
    return asked[-1] if asked else RunConfig().output


def leave(mistake: UserError) -> NoReturn:
    """End the process with a user's mistake: one message, exit code 2."""
    write_for_launcher(mistake)  # torchrun then shows the mistake on its own last page
    print(mistake, file=sys.stderr)
    sys.exit(EXIT_CODE)


def job(cfg: DictConfig) -> float | None:
    """One run of the composed settings."""
    from hydra.core.hydra_config import HydraConfig

    from flatout.cli.boundary import read_config
    from flatout.cli.typed import words_as_entered

    described = HydraConfig.get()
    folder = Path(described.runtime.output_dir)
    overrides = words_as_entered(described.overrides.task)
    is_named = any(word.startswith("hydra.run.dir=") for word in described.overrides.hydra)
    # Under torchrun or Slurm each rank composes for itself, so Hydra makes a folder for each one.
    # All ranks write to that of the first; a folder that you name is the same for all.
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0" and not is_named:
        _remove_empty(folder)
    try:
        config = read_config(cfg, overrides)
        from flatout.run.claimed_folders import claim_folder, claim_named_folder
        from flatout.run.launch import start, start_on_ray

        words = [*conf_words(described.runtime.config_sources), *overrides]
        workers = workers_of_ray(described.launcher)
        begin = partial(start_on_ray, workers=workers) if workers is not None else start
        claim = claim_named_folder if is_named else claim_folder
        named = [folder] if is_named else []
        result = begin(config, folder=folder, overrides=words, claim=claim, named=named)
        if result.folder != folder.absolute():
            _remove_empty(folder)  # Hydra made it, but the run resumed another one
        return result.objective
    except UserError as mistake:
        # A mistake in the settings leaves nothing behind: neither the folder of this run nor the
        # `outputs/2026-01-31` above it, which Hydra makes too.
        made_by_hydra = [folder]
        if not is_named:
            above = folder.parents[1:2]
            made_by_hydra += [folder.parent, *(each for each in above if each.name == "outputs")]
        _remove_empty(*made_by_hydra)
        leave(mistake)
    except BaseException:
        _remove_empty(folder)
        raise


def workers_of_ray(launcher: DictConfig) -> int | None:
    """How many workers of Ray train the run; None if it trains on this machine."""
    is_on_ray = launcher.get("place") == Place.ray
    workers = launcher.get("workers", 1)
    require(
        is_on_ray or workers == 1,
        "workers",
        f"{workers}, which are of on=ray",
        hint=(
            "Add on=ray, or set trainer.devices=N for ranks on this machine; a loader's processes"
            " are data.workers=N."
        ),
    )
    return int(workers) if is_on_ray else None


def _remove_empty(*folders: Path) -> None:
    """Remove folders in this order; one that holds anything stays."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def main(arguments: Sequence[str] | None = None) -> None:
    start_hydra(sys.argv[1:] if arguments is None else arguments, job)
