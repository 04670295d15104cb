"""What the protections cost: steps and saves with all of them, against none."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from safetensors.torch import save_file

from flatout.bench.claim import Claim, Options, in_turn, quiet
from flatout.bench.faults.runs import Spec, train
from flatout.checkpoint_folder import STATE, TENSORS, FolderCheckpointIO
from flatout.checkpoints import Checkpoints
from flatout.durable import sync_file
from flatout.optim import clip_gradients
from flatout.position import RandomState
from flatout.tasks.step import StepTask


def costs(place: Path, options: Options) -> Iterator[Claim]:
    """R24: a step and a save with everything on, as shares above the same with everything off."""
    for name, spec in _SPECS.items():
        count = itertools.count()

        def step_ms(guarded: bool, name: str = name, spec: Spec = spec, count: Iterator[int] = count) -> float:
            return _step_ms(spec, place / f"{name}-{next(count)}", guarded)

        step_ms(True)  # builds the store
        on, off = in_turn([partial(step_ms, True), partial(step_ms, False)], options.rounds)
        over = 100 * (on / off - 1)
        note = f"{on:.3f} ms a step with all protections, {off:.3f} ms without"
        yield _at_most_over(f"R24 protections' part of a step, {name}", over, 1.0, note)
    tensors = {f"weight-{number}": torch.randn(1_000_000 if options.quick else 4_000_000) for number in range(8)}
    on, off = in_turn([lambda: _save_s(place, tensors, True), lambda: _save_s(place, tensors, False)], options.rounds)
    note = f"{on:.3f} s with checksums, {off:.3f} s without, of {sum(t.nbytes for t in tensors.values()) / 1e6:.0f} MB"
    yield _at_most_over("R24 checksums' part of a save", 100 * (on / off - 1), 3.0, note)


_SPECS = {
    "an encoder": Spec(
        "encoder", batch_size=32, data={"max_length": 64}, trainer={"max_epochs": 8}, checkpoint={"every_steps": None}
    ),
    "bit strings": Spec("bits", batch_size=32, trainer={"max_epochs": 8}, checkpoint={"every_steps": None}),
}


def _at_most_over(claim: str, over: float, most: float, note: str) -> Claim:
    return Claim(claim, over, None, "%", None, f"≤ {most:g} %", over <= most, note)


def _step_ms(spec: Spec, folder: Path, guarded: bool) -> float:
    """A step's time in training, the median over steps, without saves and validations."""
    clock = _Clock()
    with quiet(), _protections(guarded):
        train(spec.planted(_Told, clock=clock), folder, resume=None)
    return clock.median_ms()


class _Clock:
    """Times from the end of a step to the end of the next."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self.last: float | None = None

    def tick(self) -> None:
        now = time.perf_counter()
        if self.last is not None:
            self.found.append(now - self.last)
        self.last = now

    def median_ms(self) -> float:
        return 1000 * sorted(self.found)[len(self.found) // 2]


class _Told(L.Callback):
    def __init__(self, clock: _Clock) -> None:
        self.clock = clock

    def on_train_batch_start(self, *_: Any) -> None:
        self.clock.tick()

    def on_validation_start(self, *_: Any) -> None:
        self.clock.last = None


@contextmanager
def _protections(guarded: bool) -> Iterator[None]:
    """With all of them, or with steps that are not looked at and boundaries that nobody notes."""
    if guarded:
        yield
        return

    def unguarded(self: StepTask, optimizer: torch.optim.Optimizer, step: int) -> bool:
        if self.clip:
            clip_gradients(self._trained, self.clip)
        return True

    def unnoted(self: Checkpoints, *_: Any) -> None:
        self.at = replace(self.at, step=self.at.step + 1)
        self._random = self._random or RandomState(torch.device("cpu"))

    with (
        mock.patch.object(StepTask, "_is_sound", unguarded),
        mock.patch.object(Checkpoints, "on_train_batch_end", unnoted),
    ):
        yield


def _save_s(place: Path, tensors: dict[str, torch.Tensor], with_checksums: bool) -> float:
    target = place / "saved"
    shutil.rmtree(target, ignore_errors=True)
    began = time.perf_counter()
    if with_checksums:
        FolderCheckpointIO().save_checkpoint({"state_dict": tensors}, target)
        return time.perf_counter() - began
    # The same bytes on the disk, unsealed.
    target.mkdir()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, target / TENSORS)
    (target / STATE).write_text(json.dumps({}), encoding="utf-8")
    for path in (target / TENSORS, target / STATE, target):
        sync_file(path)
    return time.perf_counter() - began
