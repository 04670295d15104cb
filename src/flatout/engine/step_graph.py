"""Optimizer steps as one launch: a step is captured once for each shape of batches, then replayed.

A small model's step is a few hundred short kernels, and the host takes longer to ask for each than
the card to compute it. A captured step asks once. `StepGraphs.take` gets each batch:

    a shape of its own?  no -> a plain step trains on the batch
    copy it into the buffer of its shape
    first steps, also of each shape  -> a plain step trains on the buffer
    the proof            -> plain and replayed steps from the same start, compared and timed
    later                -> a replay; the first of another shape captures it

Plain and captured steps are the same function (`Step.run_at_once`), and so have the same bits. What
changes from step to step lies on the device: the batch, its number of rows, the learning rates
(`device_rates.py`), the flag of a broken step. The training stays plain where a replay gives other
numbers than plain steps give among themselves, where it is no faster, or where a capture fails. One
line says which, and `summary` says at the end what was replayed.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatout.engine.captures import Capture, Replayable
from flatout.engine.device_rates import DeviceRates
from flatout.engine.random_state import random_state, restore_random_state

if TYPE_CHECKING:
    from flatout.data.batches.flat_batch import FlatBatch
    from flatout.data.batches.shapes import Shape, Shapes
    from flatout.engine.step import Step

_PLAIN_FIRST = 3  # steps; the optimizer makes its state in the first, kernels are chosen
_ROUNDS = 3  # plain and replayed steps of the proof, in turn
_NOISE = 4.0
"""How many times as far as plain steps from each other a replay may be from one. Kernels that add
in any order give other bits in each run; where they give the same, a replay has to."""


@dataclass(slots=True)
class _Graph:
    """A captured step, the buffer that it reads, and the numbers that it leaves."""

    captured: Replayable
    loss: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class _Proof:
    """What plain and replayed steps from the same start have shown."""

    plain_ms: float
    replay_ms: float
    noise: float  # largest difference of a number among plain steps
    distance: float  # largest difference of a number between a replay and a plain step


class StepGraphs:
    """Takes the steps of a training by replays, where that is proven."""

    def __init__(self, step: Step, shapes: Shapes, capture: Capture, *, must_gain: bool) -> None:
        """`must_gain`: whether the training stays plain where replays are no faster."""
        self._step = step
        self._shapes = shapes
        self._capture = capture
        self._must_gain = must_gain
        self._rates = DeviceRates(step.optimizer, step.module.device)
        step.rates = self._rates
        self._buffers: dict[Shape, FlatBatch] = {}
        self._graphs: dict[Shape, _Graph] = {}
        self._weights: list[Any] = []  # what the graphs know of the weights, see `_describe`
        self._is_proven = False
        self.why_off = ""  # why no step is replayed any more
        self.evidence = ""  # of the proof
        self.replayed = 0  # steps
        self.plain = Counter[str]()  # other steps by reason
        self._tokens = 0  # of all replayed batches
        self._computed_tokens = 0  # of their buffers

    def take(self, batch: FlatBatch) -> FlatBatch | None:
        """Take the step of a batch; if a plain step must take it, the batch for that step."""
        shape = self._shape_of(batch)
        if isinstance(shape, str):
            self.plain[shape] += 1
            return batch
        is_first_of_shape = shape not in self._buffers
        buffer = self._fill(shape, batch)
        if self._plain_steps < _PLAIN_FIRST or not self._step.optimizer.state:
            self.plain["the first steps"] += 1
            return buffer
        if is_first_of_shape:
            # Libraries choose kernels and make workspaces then, which a capture may not.
            self.plain["the first of a shape"] += 1
            return buffer
        self._forget_other_weights()
        self._rates.update()
        try:
            graph = self._graphs.get(shape)
            if graph is None and not self._is_proven:
                graph = self._prove(shape, buffer)
            else:
                if graph is None:
                    graph = self._capture_step(shape, buffer)
                graph.captured.replay()
        except RuntimeError as error:  # out of memory, or a kernel that no graph may hold
            self._turn_off(f"its capture failed ({_first_line(error)})")
            return batch
        if graph is None:
            return batch
        self.replayed += 1
        self._tokens += batch.num_tokens
        self._computed_tokens += self._tokens_of(shape)
        # copies, as the next replay writes to the same addresses
        self._step.finish(graph.loss.clone(), graph.norm.clone())
        return None

    def summary(self) -> str:
        """Which share of the steps was replayed, and why each other one was not."""
        facts = self.facts()
        steps = self.replayed + self.plain.total()
        others = ", ".join(f"{count:,} {reason}" for reason, count in self.plain.most_common())
        if not self.replayed:
            return f"off, {self.why_off}" if self.why_off else f"no step, {others}"
        replayed = (
            f"{self.replayed / steps:.1%} of {steps:,} steps in one launch each,"
            f" {facts['graphs']} graphs, {facts['padding_share']:.1%} padding,"
            f" {facts['memory_mb']:.0f} MB"
        )
        return f"{replayed}; plainly: {others}" if others else replayed

    def facts(self) -> dict[str, Any]:
        """The same as numbers."""
        return {
            "replayed_steps": self.replayed,
            "plain_steps": dict(self.plain),
            "graphs": len(self._graphs),
            "padding_share": self._computed_tokens / max(1, self._tokens) - 1,
            "memory_mb": self._capture.num_bytes / 1e6,
            "evidence": self.evidence or self.why_off,
        }

    @property
    def _plain_steps(self) -> int:
        return self.plain["the first steps"]

    def _shape_of(self, batch: FlatBatch) -> Shape | str:
        if self.why_off:
            return self.why_off
        if self._step.pieces.are_cut_for_training:
            return "batches in pieces"
        return self._shapes.shape_of(batch)

    def _tokens_of(self, shape: Shape) -> int:
        """Tokens that a step of this shape computes."""
        is_rectangle = self._shapes.is_padded and not shape.is_even
        return shape.rows * shape.longest if is_rectangle else shape.tokens

    def _fill(self, shape: Shape, batch: FlatBatch) -> FlatBatch:
        buffer = self._buffers.get(shape)
        if buffer is None:
            buffer = self._shapes.make(shape, batch)
            self._buffers[shape] = buffer
            return buffer
        return self._shapes.fill(buffer, batch)

    def _forget_other_weights(self) -> None:
        """Drop all graphs if weights have other addresses or settings than when captured."""
        weights = [self._step.side.longest_gradient, *_describe(self._step.optimizer)]
        if weights != self._weights:
            self._graphs.clear()
            self._weights = weights

    def _capture_step(self, shape: Shape, buffer: FlatBatch) -> _Graph:
        start = _Start(self._step)
        state = self._step.optimizer.state
        num_states = len(state)
        outputs = list[Tensor]()

        def run() -> None:
            outputs.extend(self._step.run_at_once(buffer))
            if len(state) != num_states:  # a replay would make it anew each time
                raise RuntimeError("the optimizer makes state for a weight")

        try:
            captured = self._capture.capture(run)
        finally:
            # A capture only records on CUDA; wherever it computes, too, nothing of it may stay.
            start.restore()
        loss, norm = outputs
        graph = _Graph(captured, loss, norm)
        self._graphs[shape] = graph
        return graph

    def _prove(self, shape: Shape, buffer: FlatBatch) -> _Graph | None:
        """Take the step plainly and by replays, always from the same start; None if replays lose.

        The last one counts, and is a replay.
        """
        start = _Start(self._step)
        try:
            graph, proof = self._try(shape, buffer, start)
        except RuntimeError:
            start.restore()
            raise
        times = f"{proof.replay_ms:.2f} ms a step in place of {proof.plain_ms:.2f}"
        # so written that numbers which are none fail, too
        if not proof.distance <= _NOISE * proof.noise:
            self._turn_off(f"a replay gives other numbers, by up to {proof.distance:.1e}")
        elif self._must_gain and proof.replay_ms >= proof.plain_ms:
            self._turn_off(f"it is no faster, {times}")
        if self.why_off:
            start.restore()
            return None
        self._is_proven = True
        bits = f"within their own noise, {proof.noise:.1e}" if proof.distance else "in all bits"
        self.evidence = f"{_ROUNDS} replays equal plain steps {bits}, {times}"
        print(f"step graph: on, {self.evidence}", flush=True)
        return graph

    def _try(self, shape: Shape, buffer: FlatBatch, start: _Start) -> tuple[_Graph, _Proof]:
        """Capture the step, then take it plainly and by a replay in turn, some rounds."""

        def run() -> None:
            self._step.run_at_once(buffer)

        run()
        first_end = _Start(self._step)
        start.restore()
        graph = self._capture_step(shape, buffer)
        plain_s = list[float]()
        replay_s = list[float]()
        noise = list[float]()
        distances = list[float]()
        for _ in range(_ROUNDS):
            start.restore()
            plain_s.append(self._capture.seconds(run))
            noise.append(first_end.distance())
            start.restore()
            replay_s.append(self._capture.seconds(graph.captured.replay))
            distances.append(first_end.distance())
        proof = _Proof(
            plain_ms=1000 * statistics.median(plain_s),
            replay_ms=1000 * statistics.median(replay_s),
            noise=max(noise),
            distance=max(distances),
        )
        return graph, proof

    def _turn_off(self, why: str) -> None:
        self.why_off = why
        self._step.rates = None
        self._graphs.clear()
        self._buffers.clear()
        print(f"step graph: off, {why}; plain steps train", flush=True)


class _Start:
    """All that a step changes, copied."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._tensors = _tensors_of(step)
        self._copies = [tensor.detach().clone() for tensor in self._tensors]
        scaler = step.side.scaler
        self._scaler = None if scaler is None else scaler.state_dict()
        self._random = random_state(step.module.device, with_others=False)

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(copy)
        if self._step.side.scaler is not None and self._scaler is not None:
            self._step.side.scaler.load_state_dict(self._scaler)
        restore_random_state(self._random, self._step.module.device)

    @torch.no_grad()
    def distance(self) -> float:
        """The largest difference of a number from when this was copied; waits for the device."""
        pairs = zip(self._tensors, self._copies, strict=True)
        differences = [_difference(now, before) for now, before in pairs if now.numel()]
        return float(torch.stack(differences).max()) if differences else 0.0


def _difference(now: Tensor, before: Tensor) -> Tensor:
    """The largest difference of two tensors' numbers; equal infinities and NaNs have none."""
    are_equal = (now == before) | (now.isnan() & before.isnan())
    return (now.double() - before.double()).abs().masked_fill(are_equal, 0.0).max()


def _tensors_of(step: Step) -> list[Tensor]:
    """Weights, buffers, the optimizer's state and the flag of a broken step."""
    tensors: list[Tensor] = [*step.module.parameters(), *step.module.buffers()]
    for state in step.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    if step.losses.broken is not None:
        tensors.append(step.losses.broken)
    return tensors


def _describe(optimizer: Optimizer) -> list[Any]:
    """What a captured step has fixed: where each weight lies, which are trained, by which numbers.

    The rates are left out; they are read anew in each replay.
    """
    facts: list[Any] = []
    for group in optimizer.param_groups:
        weights: list[nn.Parameter] = group["params"]
        facts += [(weight.data_ptr(), weight.requires_grad) for weight in weights]
        facts += [value for name, value in group.items() if name not in ("params", "lr")]
    return facts


def _first_line(error: RuntimeError) -> str:
    """What went wrong, without the advice that CUDA's errors add."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]
