"""Run a user's script unchanged, and judge each training in it.

The Trainers of `lightning`, `pytorch_lightning` and transformers get a verdict as a callback when
`fit` or `train` is called. Their modules are changed just after the script itself imports them, so
that nothing is imported that the script does not use.
"""

from __future__ import annotations

import importlib.machinery
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from flatout.perf.verdict.kept import JudgingCallback, KeptVerdict

if TYPE_CHECKING:
    import lightning as L
    from transformers import Trainer as HFTrainer


@dataclass(frozen=True, slots=True)
class JudgedTraining:
    """One call of `fit` or `train`."""

    seconds: float
    kept: KeptVerdict | None  # None on every rank but the first, and after an error


class ScriptWatch(MetaPathFinder):
    """Adds a verdict to each Trainer that trains, from the import of its module on."""

    def __init__(self) -> None:
        self.trainings: list[JudgedTraining] = []
        self._undo = ExitStack()
        # Lightning may start the other ranks itself, as plain scripts without a verdict. Then this
        # rank must not wait for theirs.
        self._gathers_ranks = "RANK" in os.environ
        self._changes: dict[str, tuple[str, Callable[[Any], JudgingCallback]]] = {
            "lightning.pytorch.trainer.trainer": ("fit", self._judge_lightning),
            "pytorch_lightning.trainer.trainer": ("fit", self._judge_lightning),
            "transformers.trainer": ("train", self._judge_transformers),
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager in which Trainers are judged."""
        with self._undo:
            for name in self._changes:
                if name in sys.modules:
                    self._change(sys.modules[name])
            sys.meta_path.insert(0, self)
            self._undo.callback(sys.meta_path.remove, self)
            yield

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a Trainer's module as all others would, and change it after its import."""
        if fullname not in self._changes:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                run = partial(self._run_and_change, spec.loader.exec_module)
                setattr(spec.loader, "exec_module", run)  # noqa: B010  # mypy refuses a method
                return spec
        return None

    def _run_and_change(self, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        run(module)
        self._change(module)

    def _change(self, module: ModuleType) -> None:
        """Let the Trainer of a module be judged in its `fit` or `train`."""
        method_name, add_verdict = self._changes[module.__name__]
        train = getattr(module.Trainer, method_name)

        @wraps(train)
        def judged_train(trainer: object, *arguments: Any, **named: Any) -> Any:
            verdict = add_verdict(trainer)
            verdict.kept = None
            began = time.perf_counter()
            try:
                return train(trainer, *arguments, **named)
            finally:
                seconds = time.perf_counter() - began
                self.trainings.append(JudgedTraining(seconds, verdict.kept))

        setattr(module.Trainer, method_name, judged_train)
        self._undo.callback(setattr, module.Trainer, method_name, train)

    def _judge_lightning(self, trainer: L.Trainer) -> JudgingCallback:
        from flatout.engine.lightning_internals import callbacks_of, set_callbacks
        from flatout.perf.verdict.anywhere import Verdict

        callbacks = callbacks_of(trainer)
        for callback in callbacks:
            if isinstance(callback, Verdict):
                return callback
        verdict = Verdict()
        verdict.gathers_ranks = self._gathers_ranks
        set_callbacks(trainer, [verdict, *callbacks])
        return verdict

    def _judge_transformers(self, trainer: HFTrainer) -> JudgingCallback:
        from flatout.perf.verdict.transformers_trainer import attach_to

        return attach_to(trainer)


def run_script(script: Path, words: Sequence[str]) -> BaseException | None:
    """Run a script as `python script words` does; return what ended it, None for its last line."""
    own_words = sys.argv
    own_folder = sys.path[0]
    sys.argv = [str(script), *words]
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script.absolute()), run_name="__main__")
    except BaseException as error:
        # What ends the script, such as SystemExit, is handed on once its trainings are judged.
        return error
    finally:
        sys.argv = own_words
        sys.path[0] = own_folder
    return None


def cut_traceback(script: Path, error: BaseException) -> BaseException:
    """The error with its traceback from the script's own first line on, without lines of this file.

    A method of a Trainer that is judged is called by one of this file.
    """
    lines = list[TracebackType]()
    traceback = error.__traceback__
    file = str(script.absolute())
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if (lines or name == file) and name != __file__:
            lines.append(traceback)
        traceback = traceback.tb_next
    shortened: TracebackType | None = None
    for line in reversed(lines):
        shortened = TracebackType(shortened, line.tb_frame, line.tb_lasti, line.tb_lineno)
    return error.with_traceback(shortened)
