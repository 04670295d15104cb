"""Optimizer steps as one launch: a step is captured once for each shape of batches, then replayed.

A small model's step is a few hundred short kernels, and the host takes longer to ask for each than
the card to compute it. A captured step asks once. `StepGraphs.take` gets each batch:

    does a shape fit?    no -> a plain step trains on the batch
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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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
"""A replay may differ from a plain step by this many times what plain steps differ among
themselves. Kernels that add in any order give other bits in each run; where they do not, a replay
has to be equal in all bits."""
_MOST_BUFFERS = 16  # shapes, also by the number of labels; batches of rarer ones are plain


Apart = tuple[float, float]
"""The largest difference of two steps: of all numbers that they change, and of loss and norm."""


@dataclass(slots=True)
class _Graph:
    """A captured step, the buffer that it reads, and the numbers that it leaves."""

    captured: Replayable
    loss: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class _Proof:
    """What plain and replayed steps from the same start have shown."""

    plain_ms: float  # of a step on the batch itself
    replay_ms: float  # with the copy of the batch into its buffer
    noise: Apart  # among plain steps on the buffer
    distance: Apart  # between a replay and a plain step
    moved: float  # how far a step moves a number; 0: it was left out, and proves nothing

    def differs(self) -> bool:
        """Whether a replay is further from plain steps than these are from each other."""
        pairs = zip(self.distance, self.noise, strict=True)
        # `not <=`: NaN differs, too
        return any(not distance <= _NOISE * noise for distance, noise in pairs)


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
        self._facts: list[Any] = []  # what the graphs have fixed, see `_describe`
        self._unfit: set[Shape] = set()  # those that could not be captured
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
        if reason := self._reason_for_plain(is_first_of_shape=is_first_of_shape):
            self.plain[reason] += 1
            return buffer
        self._rates.update()
        # Until it is counted, what an interrupt leaves behind is no state between two steps.
        self._step.is_at_once = True
        try:
            graph = self._replay(shape, buffer)
        except RuntimeError as error:  # out of memory, or a kernel that no graph may hold
            self._give_up(shape, _first_line(error))
            graph = None
        if graph is None:
            self._step.is_at_once = False
            # A trial leaves its gradients, to which the plain step would add its own.
            self._step.optimizer.zero_grad()
            if self.why_off:
                return batch
            self.plain["that could not be replayed"] += 1
            return buffer
        self.replayed += 1
        self._tokens += batch.num_tokens
        self._computed_tokens += self._tokens_of(shape)
        # copies, as the next replay writes to the same addresses
        self._step.finish(graph.loss.clone(), graph.norm.clone())
        # A batch is a slice of many that were gathered at once, which it would keep in memory.
        buffer.copied_from = None
        return None

    def _reason_for_plain(self, *, is_first_of_shape: bool) -> str:
        """Why a plain step must train on the buffer; empty where it may be a replay."""
        if self.plain["the first steps"] < _PLAIN_FIRST or not self._step.optimizer.state:
            return "the first steps"
        if is_first_of_shape:
            # Libraries choose kernels and make workspaces then, which a capture may not.
            return "the first of a shape"
        facts = _describe(self._step)
        if facts == self._facts:
            return ""
        self._facts = facts
        if not self._graphs:
            return ""
        # A plain step lets the optimizer and the clipping learn of the new weights.
        self._forget_graphs()
        return "the first with other weights"

    def _replay(self, shape: Shape, buffer: FlatBatch) -> _Graph | None:
        """Take the step by a replay, captured or proven first if need be; None: not taken."""
        graph = self._graphs.get(shape)
        if graph is None and not self._is_proven:
            return self._prove(shape, buffer)
        if graph is None:
            graph = self._capture_step(shape, buffer)
        graph.captured.replay()
        return graph

    def _give_up(self, shape: Shape, why: str) -> None:
        """Train batches of this shape plainly; all batches, if nothing was ever replayed."""
        self._unfit.add(shape)
        if not self._is_proven:
            self._turn_off(f"its capture failed ({why})")
            return
        print(f"step graph: batches of {shape.tokens:,} tokens stay plain ({why})", flush=True)

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._capture.forget()

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

    def _shape_of(self, batch: FlatBatch) -> Shape | str:
        if not self.why_off and self._step.pieces.are_cut_for_training:
            self._turn_off("batches are cut into pieces, as memory ran out")
        if self.why_off:
            return self.why_off
        shape = self._shapes.shape_of(batch)
        is_new = shape not in self._buffers
        if shape in self._unfit or (is_new and len(self._buffers) >= _MOST_BUFFERS):
            return "of a shape that is not captured"
        return shape

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

    def _capture_step(self, shape: Shape, buffer: FlatBatch) -> _Graph:
        start = _Snapshot(self._step)
        state = self._step.optimizer.state
        weights_with_state = set(state)
        outputs = list[Tensor]()

        def run() -> None:
            outputs.extend(self._step.run_at_once(buffer))
            if len(state) != len(weights_with_state):
                raise RuntimeError("the optimizer makes state for a weight")

        try:
            captured = self._capture.capture(run)
        finally:
            # State that was made in a capture was never filled, and each replay would make it anew.
            for weight in set(state) - weights_with_state:
                del state[weight]
            # A capture only records on CUDA; wherever it computes, too, nothing of it may stay.
            start.restore()
        loss, norm = outputs
        graph = _Graph(captured, loss, norm)
        self._graphs[shape] = graph
        return graph

    def _prove(self, shape: Shape, buffer: FlatBatch) -> _Graph | None:
        """Take the step plainly and by replays, always from the same start.

        The last one counts, and is a replay. None if the step was not taken.
        """
        start = _Snapshot(self._step)
        try:
            graph, proof = self._try(shape, buffer, start)
        except BaseException:  # an interrupt, too: no half of a trial may stay
            start.restore()
            raise
        times = f"{proof.replay_ms:.2f} ms a step in place of {proof.plain_ms:.2f}"
        if proof.differs():
            self._turn_off(f"a replay gives other numbers, by up to {max(proof.distance):.1e}")
        elif proof.moved and self._must_gain and proof.replay_ms >= proof.plain_ms:
            self._turn_off(f"it is no faster, {times}")
        if self.why_off or not proof.moved:
            start.restore()
            return None
        self._is_proven = True
        noise = max(proof.noise)
        bits = f"within their own noise, {noise:.1e}" if max(proof.distance) else "in all bits"
        self.evidence = f"{_ROUNDS} replays equal plain steps {bits}, {times}"
        print(f"step graph: on, {self.evidence}", flush=True)
        return graph

    def _try(self, shape: Shape, buffer: FlatBatch, start: _Snapshot) -> tuple[_Graph, _Proof]:
        """Capture the step, then take it plainly and by a replay in turn, some rounds."""
        batch = buffer.copied_from
        assert batch is not None

        def train_on_batch() -> None:
            self._step.run_at_once(batch)

        def fill_and_replay() -> None:
            self._shapes.fill(buffer, batch)
            graph.captured.replay()

        first_outputs = _copy(self._step.run_at_once(buffer))
        moved = start.distance()
        first_end = _Snapshot(self._step)
        start.restore()
        graph = self._capture_step(shape, buffer)
        plain_s = list[float]()
        replay_s = list[float]()
        noise = list[Apart]()
        distances = list[Apart]()
        for _ in range(_ROUNDS):
            start.restore()
            plain_s.append(self._capture.seconds(train_on_batch))
            start.restore()
            outputs = self._step.run_at_once(buffer)
            noise.append((first_end.distance(), _distance(outputs, first_outputs)))
            start.restore()
            replay_s.append(self._capture.seconds(fill_and_replay))
            outputs = (graph.loss, graph.norm)
            distances.append((first_end.distance(), _distance(outputs, first_outputs)))
        proof = _Proof(
            plain_ms=1000 * statistics.median(plain_s),
            replay_ms=1000 * statistics.median(replay_s),
            noise=(max(pair[0] for pair in noise), max(pair[1] for pair in noise)),
            distance=(max(pair[0] for pair in distances), max(pair[1] for pair in distances)),
            moved=moved,
        )
        return graph, proof

    def _turn_off(self, why: str) -> None:
        self.why_off = why
        self._step.rates = None
        self._forget_graphs()
        self._buffers.clear()
        print(f"step graph: off, {why}; plain steps train", flush=True)


class _Snapshot:
    """All that a step changes, copied."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._tensors = _tensors_of(step)
        self._copies = _copy(self._tensors)
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

    def distance(self) -> float:
        """The largest difference of a number from when this was copied; waits for the device."""
        return _distance(self._tensors, self._copies)


def _copy(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def _distance(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest difference of a number; waits for the device."""
    pairs = zip(tensors, others, strict=True)
    differences = [_difference(now, before) for now, before in pairs if now.numel()]
    return float(torch.stack(differences).max()) if differences else 0.0


def _difference(now: Tensor, before: Tensor) -> Tensor:
    """The largest difference of two tensors' numbers; equal infinities and NaNs have none."""
    are_equal = (now == before) | (now.isnan() & before.isnan())
    return (now.double() - before.double()).abs().masked_fill(are_equal, 0.0).max()


def _tensors_of(step: Step) -> list[Tensor]:
    """Weights, buffers, the optimizer's state and the flag of a broken step."""
    tensors: list[Tensor] = [*step.module.parameters(), *step.module.buffers()]
    tensors += _states_of(step)
    if step.losses.broken is not None:
        tensors.append(step.losses.broken)
    return tensors


def _states_of(step: Step) -> list[Tensor]:
    """The state that the optimizer keeps for all weights."""
    states = step.optimizer.state.values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _describe(step: Step) -> list[Any]:
    """What a captured step has fixed: where all lies, which weights are trained, by which numbers.

    The rates are left out, as each replay reads them.
    """
    facts: list[Any] = [step.side.longest_gradient]
    facts += [tensor.data_ptr() for tensor in (*step.module.parameters(), *_states_of(step))]
    for group in step.optimizer.param_groups:
        facts += [weight.requires_grad for weight in group["params"]]
        facts += [value for name, value in group.items() if name not in ("params", "lr")]
    return facts


def _first_line(error: RuntimeError) -> str:
    """What went wrong, without the advice that CUDA's errors add."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]
