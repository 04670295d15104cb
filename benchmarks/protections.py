"""What the protections of a run cost: their part of each step, and of each save.

Protections: a look at each gradient, the noted boundary of each step, and a checksum of each file
of a checkpoint. `pytest -m soak` shows what they are good for.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from benchmarks.claim import Claim, Options, in_turn, quiet
from flatout.bits.settings import BitsDataConfig
from flatout.checkpoints.exact import ExactCheckpoint
from flatout.checkpoints.folder import STATE, TENSORS, FolderCheckpointIO
from flatout.checkpoints.settings import CheckpointConfig
from flatout.data.texts.settings import TextDataConfig
from flatout.engine import step
from flatout.engine.fast_loop import FastLoop
from flatout.engine.step import Step
from flatout.files import sync_file, sync_folder
from flatout.models.bit_mlp import BitMLPConfig
from flatout.models.encoder.transformer import TransformerConfig
from flatout.run.launch import fit


def claims(options: Options) -> Iterator[Claim]:
    """The time spent in protections, as a share of what is left of a step and of a save without
    them.
    """
    with tempfile.TemporaryDirectory() as folder:
        yield from _costs(Path(folder), options)


def _costs(place: Path, options: Options) -> Iterator[Claim]:
    text = TextDataConfig(batch_size=32)
    bits = BitsDataConfig(batch_size=128)
    text.sample.rows, bits.sample.rows = (
        options.choose(20_000, 1_500, 160),
        options.choose(20_000, 3_000, 160),
    )
    for name, data, model in (
        ("an encoder of 2 layers", text, TransformerConfig(hidden=128, layers=2, heads=4)),
        ("bit strings", bits, BitMLPConfig()),
    ):
        protecting_us, step_us = _times(data, model, place / name)
        note = (
            f"{protecting_us:,.0f} of {step_us:,.0f} µs: the gradient looked at, the boundary noted"
        )
        yield _at_most(f"protections above a step, {name}", protecting_us, step_us, 1.0, note)
    size = options.choose(4_000_000, 1_000_000, 1_000)
    tensors = {f"weight-{number}": torch.randn(size) for number in range(8)}
    sealed, bare = in_turn(
        [lambda: _save_s(place, tensors), lambda: _bare_save_s(place, tensors)], options.rounds
    )
    megabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    note = (
        f"{sealed:.3f} s, and {bare:.3f} s for the same {megabytes:.0f} MB synced without checksums"
    )
    yield _at_most("checksums above a save", sealed - bare, bare, 3.0, note)


def _at_most(claim: str, extra: float, rest: float, most: float, note: str) -> Claim:
    over = 100 * extra / rest
    return Claim(claim, over, None, "%", None, f"≤ {most:g} %", over <= most, note)


def _times(data: Any, model: Any, folder: Path) -> tuple[float, float]:
    """Microseconds a step spends in protections, and in everything else; medians over the steps of
    one epoch.
    """
    watch = _StopWatch()
    settings: dict[str, Any] = {
        "trainer": {"accelerator": "cpu"},
        "checkpoint": CheckpointConfig(every_minutes=None),
    }
    with (
        quiet(),
        watch.beginning(FastLoop, "_run_batch"),
        watch.on(ExactCheckpoint, "on_train_batch_end"),
        watch.on(Step, "_clip_and_check"),
        watch.off(step, "clip_gradients"),
    ):
        fit(data, model, epochs=1, folder=folder, **settings)
    parts = watch.parts[len(watch.parts) // 10 :]  # the first are slow in everything
    protecting = statistics.median(part for part, _ in parts)
    return 1e6 * protecting, 1e6 * statistics.median(whole - part for part, whole in parts)


class _StopWatch:
    """Time spent in some functions, a step at a time."""

    def __init__(self) -> None:
        self.parts: list[tuple[float, float]] = []
        self._spent = 0.0
        self._since: float | None = None

    @contextmanager
    def beginning(self, owner: Any, name: str) -> Iterator[None]:
        """A step begins where this is called."""
        plain: Callable[..., Any] = getattr(owner, name)

        def told(*arguments: Any) -> Any:
            self._tell()
            return plain(*arguments)

        told.__dict__.update(plain.__dict__)
        with mock.patch.object(owner, name, told):
            yield

    def _tell(self) -> None:
        now = time.perf_counter()
        if self._since is not None:
            self.parts.append((self._spent, now - self._since))
        self._spent = 0.0
        self._since = now

    def on(self, owner: Any, name: str) -> Any:
        return self._around(owner, name, 1.0)

    def off(self, owner: Any, name: str) -> Any:
        """What would be done anyway, inside of one that is counted."""
        return self._around(owner, name, -1.0)

    @contextmanager
    def _around(self, owner: Any, name: str, sign: float) -> Iterator[None]:
        plain: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return plain(*arguments)
            finally:
                self._spent += sign * (time.perf_counter() - began)

        with mock.patch.object(owner, name, timed):
            yield


def _save_s(place: Path, tensors: dict[str, torch.Tensor]) -> float:
    target = place / "sealed" / "step-1"
    shutil.rmtree(target.parent, ignore_errors=True)
    began = time.perf_counter()
    FolderCheckpointIO().save_checkpoint({"state_dict": tensors}, target)
    return time.perf_counter() - began


def _bare_save_s(place: Path, tensors: dict[str, torch.Tensor]) -> float:
    """The same bytes, synced, without checksums and without a name of their own first."""
    target = place / "bare"
    shutil.rmtree(target, ignore_errors=True)
    began = time.perf_counter()
    target.mkdir()
    save_file(tensors, target / TENSORS)
    (target / STATE).write_text(json.dumps({}), encoding="utf-8")
    sync_file(target / TENSORS)
    sync_file(target / STATE)
    sync_folder(target)
    return time.perf_counter() - began
