"""Attempts to have something executed, or written outside of a run's folder: how many were refused.

The cases stand in `targets` and `paths`. Each is tried in a folder of its own, with
bait beside it that makes a file, the canary, when it is executed; a case holds when it ended in a
message to the person and nothing new lies anywhere but in the folder of runs.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from flatout.distributed.processes import warm_start
from flatout.errors import EXIT_CODE, UserError
from tests.hostile.paths import Planted, carelessly, path_cases
from tests.hostile.targets import Case, all_cases, quick_cases

TINY = (
    "data.sample.rows=100",
    "data.sample.eval_rows=20",
    "data.batch_size=64",
    "trainer.max_epochs=1",
    "monitor.progress=false",
    "logger=none",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an attempt."""

    is_refused: bool
    """Whether it ended in one message and exit code 2."""
    is_executed: bool
    said: str


def refused_targets(full: bool) -> tuple[int, int]:
    """Attempts that were refused without anything executed, and how many were made."""
    cases = all_cases() if full else quick_cases()
    warm_start()  # from a folder that stays
    found = [tried(case) for case in cases]
    return sum(each.is_refused and not each.is_executed for each in found), len(found)


def kept_inside(full: bool) -> tuple[int, int]:
    """Attempts to leave the folder of runs after which all outside was as before, and how many were
    made.
    """
    warm_start()
    found = [stayed(case) for case in path_cases(full)]
    return sum(found), len(found)


def stayed(case: Case | Planted) -> bool:
    """Whether all outside of the folder of runs is as it was; by settings, also whether it was
    refused.
    """
    if isinstance(case, Case):
        found = tried(case)
        return found.is_refused and not found.is_executed
    with bait() as place:
        found = outcome(place, lambda: carelessly(case, place))
        return not found.is_executed and "Error" not in found.said


def tried(case: Case) -> Outcome:
    """Try a case in this process."""
    with bait() as place:
        run = _run_whole if case.is_whole else _compose
        words, environment = filled(case, place)
        return outcome(place, lambda: run(words, environment))


def filled(case: Case, place: Path) -> tuple[list[str], dict[str, str]]:
    """A case's words and environment for a place, and its files put there."""

    def fill(text: str) -> str:
        for name in ("canary", "bait", "outside"):
            text = text.replace(f"<{name}>", str(place / name))
        return text

    for name, text in case.files.items():
        (place / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "conf" / name).write_text(fill(text), encoding="utf-8")
    return [fill(word) for word in case.words], {
        name: fill(value) for name, value in case.environment.items()
    }


def _compose(words: list[str], environment: dict[str, str]) -> None:
    """Compose as `python -m train` does, and read the settings of the run."""
    from hydra import compose, initialize_config_dir

    from flatout.cli.boundary import read_config
    from flatout.cli.composing import explain_errors
    from flatout.cli.hydra_internals import guard_hydra
    from flatout.cli.train import register_schemas
    from flatout.cli.words import conf_folder

    guard_hydra()
    register_schemas()
    words = [
        *words,
        f"output={Path.cwd()}/outputs",
        f"hydra.searchpath=['file://{Path.cwd().parent}/conf']",
    ]
    conf = conf_folder()
    with (
        _environment(environment),
        initialize_config_dir(str(conf), version_base="1.3"),
        explain_errors(),
    ):
        read_config(compose("train", words), words)


def _run_whole(words: list[str], environment: dict[str, str]) -> None:
    import train

    options = [
        f"--config-dir={Path.cwd().parent}/conf",
        *(word for word in words if word.startswith("-")),
    ]
    if (
        option := next(
            (word for word in words if word in ("--config-path", "-cp") or "--exp" in word), ""
        )
    ) in words:
        options = [option, *words[words.index(option) + 1 :]]
        words = []
    rest = [word for word in words if not word.startswith("-")]
    with _environment(environment):
        train.main([*options, *TINY, f"output={Path.cwd()}/outputs", *rest])


def outcome(place: Path, attempt: Callable[[], None]) -> Outcome:
    """Whether an attempt ended in a message, and whether anything new lies outside of the folder of
    runs.
    """
    before = files_outside(place)
    said = io.StringIO()
    is_refused = False
    with redirect_stdout(io.StringIO()), redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            attempt()
        except UserError as mistake:
            is_refused = True
            said.write(str(mistake))
        except SystemExit as left:
            is_refused = left.code == EXIT_CODE and "Traceback" not in said.getvalue()
        except BaseException as error:
            said.write(f"{type(error).__name__}: {error}")
            if isinstance(error, KeyboardInterrupt):
                raise
    return Outcome(is_refused, files_outside(place) != before, said.getvalue())


def files_outside(place: Path) -> dict[str, int]:
    """Everything in a place but for its folder of runs, and how large it is."""
    inside = place / "work" / "outputs"
    found = [path for path in place.rglob("*") if path != inside and inside not in path.parents]
    return {str(path): path.lstat().st_size for path in found if "__pycache__" not in path.parts}


class _Payload:
    """Makes the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.canary),)


@contextmanager
def bait() -> Iterator[Path]:
    """A place with bait in it, `work` the current folder, and the bait's modules ready to be
    imported.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder).resolve()
        lay_bait(place)
        before = Path.cwd()
        path = list(sys.path)
        modules = set(sys.modules)
        os.chdir(place / "work")
        sys.path.insert(0, str(place / "bait"))
        try:
            yield place
        finally:
            os.chdir(before)
            sys.path[:] = path
            for name in set(sys.modules) - modules:
                if name.partition(".")[0] in ("evil", "evilpackage"):
                    del sys.modules[name]


def lay_bait(place: Path) -> None:
    """Modules, pickles and a model's folder that make the canary when they are imported, unpickled
    or trusted.
    """
    import torch

    canary = place / "canary"
    folder = place / "bait"
    for name in ("work", "conf", "outside", "bait/evilpackage/inner", "bait/remote"):
        (place / name).mkdir(parents=True)
    (place / "outside" / "kept.txt").write_text("kept")
    (place / "outside" / "store").mkdir()
    store = '{"files": {}, "splits": {}, "name": "somebody\'s", "built": "long ago"}'
    (place / "outside" / "store" / "manifest.json").write_text(store)
    code = (
        f"open({str(canary)!r}, 'w').close()\n\n\ndef call(*_, **__):\n    pass\n\n\nclass Evil:\n "
        "   pass\n"
    )
    for name in (
        "evil.py",
        "evilpackage/__init__.py",
        "evilpackage/inner/__init__.py",
        "hubconf.py",
        "spare",
    ):
        (folder / name).write_text(code)
    head = "from transformers import PretrainedConfig\n"
    (folder / "remote" / "configuration_evil.py").write_text(
        f"{head}{code}class EvilConfig(PretrainedConfig):\n    model_type = 'evil'\n"
    )
    names = (
        '{"AutoConfig": "configuration_evil.EvilConfig", "AutoModel":'
        ' "configuration_evil.EvilConfig"}'
    )
    (folder / "remote" / "config.json").write_text(f'{{"model_type": "evil", "auto_map": {names}}}')
    backbone = folder / "backbone"
    backbone.mkdir()
    (backbone / "evil.py").write_text(f"{code}EvilBackbone = Evil\n")
    names = f'{{"AutoBackbone": "{backbone}--evil.EvilBackbone"}}'
    (backbone / "config.json").write_text(f'{{"model_type": "resnet", "auto_map": {names}}}')
    (folder / "payload.pickle").write_bytes(pickle.dumps(_Payload(canary)))
    torch.save({"state_dict": _Payload(canary)}, folder / "payload.pt")


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= values
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
