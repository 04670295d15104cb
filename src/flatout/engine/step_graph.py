"""Optimizer steps as one launch: a step is captured once for each shape of batches, then replayed.

A small model's step is a few hundred short kernels, and the host takes longer to ask for each than
the card to compute it. A captured step asks once. `StepGraphs.take` gets each batch:

    does a shape fit?    no -> a plain step trains on the batch
    copy it into the buffer of its shape
    first steps, also of each shape  -> a plain step trains on the buffer
    the proof            -> plain and replayed steps from the same start, compared and timed
    later                -> a replay; the first of another shape captures it

Batches of flatout's feeds are brought to few shapes (`data/batches/shapes.py`). Those of any other
module have a signature (`data/batches/signatures.py`); there plain steps are watched first
(`step_watch.py`), and each captured step has a proof. How many shapes are captured, these two say.

Plain and captured steps share forward, backward, clipping and update (`step.py`), and so have the
same bits. A captured one does all of it at once (`Step.run_at_once`). What changes from step to
step lies on the device: the batch, its number of rows, the learning rates (`device_rates.py`), the
flag of a broken step. The training stays plain where a replay gives other numbers than plain steps
give among themselves, where it is no faster, or where a capture fails. One line says which, and
`summary` says at the end what was replayed.

With a `Ring` (`step_ring.py`) many replays follow each other without a copy between them.

Open this file to change which steps are replayed, when the proof is due, and what ends the replays.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

from torch import Tensor, nn
from torch.optim import SGD

from flatout.data.batches.signatures import change_tensors, tensors_of
from flatout.engine.captures import Capture, Replayable
from flatout.engine.device_rates import DeviceRates
from flatout.engine.graph_buffers import BatchT, Buffers, Ring, ShapeT
from flatout.engine.host_state import State, first_difference, state_of_module
from flatout.engine.replay_counts import ReplayCounts
from flatout.engine.step_snapshot import (
    StepSnapshot,
    copy_of,
    distance_between,
    optimizer_states,
    task_states,
)
from flatout.engine.step_watch import Logged, StepWatch
from flatout.engine.thaws import Thaws
from flatout.errors import UserError, first_line

if TYPE_CHECKING:
    from flatout.engine.step import Step

_PLAIN_FIRST = 3  # steps; the optimizer makes its state in the first, kernels are chosen
_ROUNDS = 3  # plain and replayed steps of the proof, in turn
_NOISE = 4.0
"""A replay may differ from a plain step by this many times what plain steps differ among
themselves. Kernels that add in any order give other bits in each run; where they do not, a replay
has to be equal in all bits."""
_MOST_SEEN = 1000  # shapes that are counted; batches of any other one are plain
_MOST_CHANGES = 8
"""More changes of a module or an optimizer between steps end the replays, unless each was followed
by `_LEAST_REPLAYS` replays on average."""
_LEAST_REPLAYS = 20  # a capture takes about as long as ten plain steps
_TRAINED = "the trained weights"  # as part of what a captured step has fixed

Apart = tuple[float, float]
"""The largest difference of two steps: of all numbers that they change, and of loss and norm."""


@dataclass(slots=True)
class _Ran:
    """What a step leaves beside new weights."""

    outputs: dict[str, Any]  # of `training_step`, its loss among them
    norm: Tensor
    logged: list[Logged]

    def tensors(self) -> list[Tensor]:
        values = [call.value for call in self.logged]
        return [*tensors_of(self.outputs), self.norm, *values]


@dataclass(slots=True)
class CapturedStep(Generic[ShapeT]):
    """A captured step, the numbers that it leaves, and where its gradients lie."""

    shape: ShapeT
    captured: Replayable
    ran: _Ran
    gradients: list[tuple[nn.Parameter, Tensor | None]]


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


class StepGraphs(Generic[ShapeT, BatchT]):
    """Takes the steps of a training by replays, where that is proven."""

    def __init__(
        self,
        step: Step,
        shapes: Buffers[ShapeT, BatchT],
        capture: Capture,
        *,
        must_gain: bool = False,
        must_replay: bool = False,
        watch: StepWatch | None = None,
    ) -> None:
        """`must_gain`: whether the training stays plain where replays are no faster.

        `must_replay`: whether it is refused, by `UserError`, where no step can be replayed.

        `watch`: of a module of which nothing is known; None for tasks of flatout.
        """
        self._step = step
        self._shapes = shapes
        self._capture = capture
        self._must_gain = must_gain
        self._must_replay = must_replay
        self._watch = watch
        self._rates: DeviceRates | None = None
        if watch is None or step.side.trainer.lr_scheduler_configs:
            self._rates = DeviceRates(step.optimizer, step.module.device)
        # On the device a rate has 32 bits only. So a module that is watched reads its rates there
        # from the first replay on, and only where a schedule changes them.
        if watch is None or watch.has_replayed:
            step.rates = self._rates
        self._seen = Counter[ShapeT]()  # batches of each shape
        self._buffers: dict[ShapeT, BatchT] = {}
        self._graphs: dict[ShapeT | str, CapturedStep[ShapeT]] = {}  # that are proven
        self._facts = State()  # what the graphs have fixed, see `_describe`
        # Whether `may_replay_many` has just compared it, so that the next step need not.
        self._is_described = False
        self._changes = 0  # of `_facts` between steps
        self._unfit: set[ShapeT] = set()  # those that could not be captured
        self._is_proven = False  # for the weights that are trained now
        self._outputs: dict[str, Any] = {}  # of the last replay
        self.ring: Ring[ShapeT, BatchT] | None = None
        """Where captured steps read their batches, if many may follow each other."""
        self.thaws: Thaws | None = None
        """When layers of the network thaw; None: never."""
        self.why_off = ""  # why no step is replayed any more
        self.evidence = ""  # of the proof
        self.why_alone = "as the module is not flatout's"
        """Why the next replay is no part of a stretch."""
        self.counts = ReplayCounts()

    def take(self, batch: BatchT) -> BatchT | None:
        """Take the step of a batch; if a plain step must take it, the batch for that step."""
        shape = self._shape_of(batch)
        if isinstance(shape, str):
            self.counts.plain[shape] += 1
            return batch
        self._seen[shape] += 1
        reason = self._reason_for_plain(shape)
        if reason and self._watch is not None:
            self.counts.plain[reason] += 1
            if not self.why_off:
                self._watch.watch_next(shape)
            return batch
        buffer = self._fill(shape, batch)
        if reason:
            self.counts.plain[reason] += 1
            return buffer
        self._step.rates = self._rates
        if self._rates is not None:
            self._rates.update()
        # Until it is counted, what an interrupt leaves behind is no state between two steps.
        self._step.is_at_once = True
        graph = self._try_to_replay(shape, buffer, batch)
        if graph is None:
            self._step.is_at_once = False
            # A trial leaves its gradients, to which the plain step would add its own.
            self._step.optimizer.zero_grad()
            if self.why_off:
                self.counts.plain[self.why_off] += 1
                return batch
            self.counts.plain["that could not be replayed"] += 1
            return buffer
        self._end_replay(shape, graph, batch)
        self._shapes.release(buffer)
        return None

    def may_replay_many(self) -> bool:
        """Whether the next steps may be replays, one behind the other."""
        if self.ring is None or not self._is_proven or self.why_off or self._reason_to_end():
            return False
        self._is_described = not first_difference(self._facts, self._describe())
        return self._is_described

    def captured_step(self, batch: BatchT) -> CapturedStep[ShapeT] | None:
        """The captured step for a batch; None where it must be taken alone."""
        # a reason in place of a shape is no key
        return self._graphs.get(self._shapes.shape_of(batch))

    def replay_all(
        self,
        batches: Sequence[BatchT],
        steps: Sequence[CapturedStep[ShapeT]],
        rates: Sequence[list[float]],
    ) -> None:
        """Take the captured steps of these batches; who calls it counts them.

        `rates`: of each step, one a group of the optimizer.
        """
        assert self.ring is not None
        # an interrupt between two replays leaves no state between two counted steps
        self._step.is_at_once = True
        shapes = [step.shape for step in steps]
        self.ring.put_all(batches, shapes, rates)
        for step in steps:
            step.captured.replay()
        losses, norms = self.ring.take(len(batches))
        self._step.losses.values.extend(losses)
        self._step.losses.norms.extend(norms)
        self.counts.add_tokens(*self._shapes.count_tokens(shapes, batches))
        self.counts.replayed += len(batches)
        self.counts.at_once += len(batches)

    def take_outputs(self) -> dict[str, Any]:
        """What `training_step` would have returned for the batch that was replayed last."""
        outputs = self._outputs
        self._outputs = {}
        return outputs

    def _reason_for_plain(self, shape: ShapeT) -> str:
        """Why a plain step must train on the batch; empty where it may be a replay."""
        facts = self._facts if self._is_described else self._describe()
        self._is_described = False
        changed = first_difference(self._facts, facts)
        self._facts = facts
        had_graphs = bool(self._graphs)
        if changed and had_graphs:
            self._forget_graphs()
        # only SGD without momentum keeps nothing
        has_state = self._step.optimizer.state or isinstance(self._step.optimizer, SGD)
        if self.counts.plain["the first steps"] < _PLAIN_FIRST or not has_state:
            return "the first steps"
        if changed and (had_graphs or self._watch is not None or changed == _TRAINED):
            # A plain step lets the optimizer and the clipping learn of the new weights.
            return self._note_change(shape, changed)
        if self.thaws is not None and shape not in self._graphs and self.thaws.is_near():
            return "shortly before layers thaw"
        # Libraries choose kernels and make workspaces then, which a capture may not.
        return "the first of a shape" if self._seen[shape] <= self._shapes.plain_first else ""

    def _note_change(self, shape: ShapeT, changed: str) -> str:
        """Note a change between two steps; returns the reason for this plain step."""
        if changed == _TRAINED and self._watch is None:
            # Other kernels run now, so what was seen and proven holds no more.
            self._is_proven = False
            self._seen.clear()
            self._seen[shape] = 1
        if changed == _TRAINED and self.thaws is not None and self.thaws.notice():
            return "the first behind a thaw"
        self._changes += 1
        are_many = self._changes > _MOST_CHANGES
        if are_many and self.counts.replayed < _LEAST_REPLAYS * self._changes:
            self._turn_off(f"another value of {changed} in each step")
            return self.why_off
        if self._watch is not None:
            self._watch.forget()
            self._seen.clear()
            self._seen[shape] = 1
        return "the first after a change"

    def _try_to_replay(
        self, shape: ShapeT, buffer: BatchT, batch: BatchT
    ) -> CapturedStep[ShapeT] | None:
        """Take the step by a replay; None if it was not taken."""
        # A module of any make may fail in its own way where a number is not known.
        kind = RuntimeError if self._watch is None else Exception
        try:
            return self._replay(shape, buffer, batch)
        except kind as error:  # out of memory, or a kernel that no graph may hold
            self._give_up(shape, first_line(error))
            return None

    def _replay(self, shape: ShapeT, buffer: BatchT, batch: BatchT) -> CapturedStep[ShapeT] | None:
        """Take the step by a replay, captured or proven first if need be; None: not taken."""
        if self.ring is not None:
            self.ring.begin(buffer)
        graph = self._graphs.get(shape)
        if graph is not None:
            self._launch(graph, buffer)
            return graph
        if self._watch is not None or not self._is_proven:
            graph = self._prove(shape, buffer, batch)
        else:
            graph = self._capture_step(shape, buffer)
            self._launch(graph, buffer)
        if graph is not None:
            self._graphs[shape] = graph
        return graph

    def _launch(self, graph: CapturedStep[ShapeT], buffer: BatchT) -> None:
        """Replay the step of a filled buffer."""
        if self.ring is not None:
            self.ring.put(buffer)
        graph.captured.replay()

    def _end_replay(self, shape: ShapeT, graph: CapturedStep[ShapeT], batch: BatchT) -> None:
        """Count a replayed step, and hand on what it has computed."""
        self.counts.replayed += 1
        self.counts.alone[self.why_alone] += 1
        self.counts.add_tokens(*self._shapes.count_tokens([shape], [batch]))
        # copies, as the next replay writes to the same addresses
        self._outputs = change_tensors(graph.ran.outputs, Tensor.clone)
        if self._watch is not None:
            self._watch.log(self._step.side.trainer, graph.ran.logged)
        # with a ring the mean of the weights is moved in the captured step
        follows = self.ring is None
        self._step.finish(self._outputs["loss"], graph.ran.norm.clone(), follows=follows)
        if self.thaws is not None:
            self.thaws.follow()
        # for callbacks that read gradients
        for weight, gradient in graph.gradients:
            weight.grad = gradient

    def _give_up(self, shape: ShapeT, why: str) -> None:
        """Train batches of this shape plainly; all batches, if nothing was ever replayed."""
        self._unfit.add(shape)
        if self._watch is not None and self._watch.reason:
            self._turn_off(self._watch.reason)
        elif not self._is_proven and not self.counts.replayed:
            self._turn_off(f"its capture failed ({why})")
        else:
            print(f"step graph: batches of {shape} stay plain ({why})", flush=True)

    def _is_slower(self, proof: _Proof) -> bool:
        """Whether replays bring nothing; asked of the first proof alone, as times are noisy."""
        must_gain = self._must_gain and not self.evidence
        return must_gain and proof.replay_ms >= proof.plain_ms

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._capture.forget()

    def replays_when_resumed(self) -> bool:
        """Whether a resumed training replays steps, too."""
        return not self.why_off and (self._is_proven or self._watch is None)

    def summary(self) -> str:
        """Which share of the steps was replayed, and why each other one was not."""
        return self.counts.summary(self.why_off)

    def facts(self) -> dict[str, Any]:
        """The same as numbers."""
        return self.counts.facts() | {"evidence": self.evidence or self.why_off}

    def _shape_of(self, batch: BatchT) -> ShapeT | str:
        if not self.why_off:
            reason = self._reason_to_end()
            if reason:
                self._turn_off(reason)
        if self.why_off:
            return self.why_off
        shape = self._shapes.shape_of(batch)
        if isinstance(shape, str):
            return shape
        has_no_buffer = shape not in self._buffers and len(self._buffers) >= self._shapes.most
        is_too_rare = shape not in self._seen and len(self._seen) >= _MOST_SEEN
        if shape in self._unfit or has_no_buffer or is_too_rare:
            return "of a shape that is not captured"
        return shape

    def _reason_to_end(self) -> str:
        """Why no later step may be replayed; empty as long as they may."""
        if self._step.pieces.are_cut_for_training:
            return "batches are cut into pieces, as memory ran out"
        if self._step.side.trainer.accumulate_grad_batches != 1:
            return "a step has several batches"
        return "" if self._watch is None else self._watch.reason

    def _fill(self, shape: ShapeT, batch: BatchT) -> BatchT:
        buffer = self._buffers.get(shape)
        if buffer is None:
            buffer = self._shapes.make(shape, batch)
            self._buffers[shape] = buffer
            return buffer
        return self._shapes.fill(buffer, batch)

    def _run(self, batch: BatchT) -> _Ran:
        """A step that is tried or captured."""
        if self._watch is None:
            # Where a module may read old gradients, they stay until its forward pass is over.
            self._step.optimizer.zero_grad()
            outputs, norm = self._step.run_at_once(batch)
            if self.ring is not None:
                self.ring.follow()
            return _Ran(outputs, norm, [])
        with self._watch.trying() as logged:
            outputs, norm = self._step.run_at_once(batch)
        if self._watch.reason:
            raise RuntimeError(self._watch.reason)
        # Detached, as outputs would keep autograd's nodes of this step.
        return _Ran(change_tensors(outputs, Tensor.detach), norm, logged)

    def _run_at_place(self, buffer: BatchT) -> _Ran:
        """A step that is captured; with a ring it reads its batch there."""
        if self.ring is None:
            return self._run(buffer)
        with self.ring.capturing(buffer) as batch:
            ran = self._run(batch)
        self.ring.keep(ran.outputs["loss"], ran.norm)
        return ran

    def _snapshot(self) -> StepSnapshot:
        return StepSnapshot(self._step, [] if self.ring is None else self.ring.means())

    def _capture_step(self, shape: ShapeT, buffer: BatchT) -> CapturedStep[ShapeT]:
        start = self._snapshot()
        # What is kept as long as a weight stays the same (a cast of it, say) is made again within
        # the capture: what was kept before may be freed later.
        start.restore()
        if self.ring is not None:
            self.ring.put(buffer)
        state = self._step.optimizer.state
        weights_with_state = set(state)
        ran = list[_Ran]()

        def run() -> None:
            ran.append(self._run_at_place(buffer))
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
        gradients = [(weight, weight.grad) for weight in self._step.module.parameters()]
        self.counts.graphs += 1
        self.counts.most_bytes = max(self.counts.most_bytes, self._capture.num_bytes)
        return CapturedStep(shape, captured, ran[0], gradients)

    def _prove(self, shape: ShapeT, buffer: BatchT, batch: BatchT) -> CapturedStep[ShapeT] | None:
        """Take the step plainly and by replays, always from the same start.

        The last one counts, and is a replay. None if the step was not taken.
        """
        start = self._snapshot()
        try:
            graph, proof = self._measure_proof(shape, buffer, batch, start)
        except BaseException:
            # an interrupt, too: no half of a trial may stay
            start.restore()
            raise
        times = f"{proof.replay_ms:.2f} ms a step in place of {proof.plain_ms:.2f}"
        why_plain = ""
        if proof.differs():
            why_plain = f"a replay gives other numbers, by up to {max(proof.distance):.1e}"
        elif proof.moved and self._is_slower(proof):
            why_plain = f"it is no faster, {times}"
        if why_plain or not proof.moved:
            start.restore()
            if why_plain:
                self._turn_off(why_plain)
            return None
        self._is_proven = True
        if self.evidence and self.thaws is not None:
            self.counts.thaws += 1
        # Each step of a watched module has a proof of its own, of which the first is told.
        if not self.evidence or self._watch is None:
            noise = max(proof.noise)
            bits = f"within their own noise, {noise:.1e}" if max(proof.distance) else "in all bits"
            how = "captured again" if self.evidence else "on"
            self.evidence = f"{_ROUNDS} replays equal plain steps {bits}, {times}"
            print(f"step graph: {how}, {self.evidence}", flush=True)
        return graph

    def _measure_proof(
        self, shape: ShapeT, buffer: BatchT, batch: BatchT, start: StepSnapshot
    ) -> tuple[CapturedStep[ShapeT], _Proof]:
        """Capture the step, then take it plainly and by a replay in turn, some rounds."""
        # Plain steps of flatout's tasks train on the buffer, too, as padding changes bits.
        plain_batch = buffer if self._watch is None else batch

        def fill_and_replay() -> None:
            self._shapes.fill(buffer, batch)
            self._launch(graph, buffer)

        first_outputs = copy_of(self._run(plain_batch).tensors())
        # A step that is left out sets its flag and moves nothing else: it would prove nothing.
        moved = 0.0 if self._step.losses.is_flagged else start.distance()
        first_end = self._snapshot()
        start.restore()
        graph = self._capture_step(shape, buffer)
        plain_s = list[float]()
        replay_s = list[float]()
        noise = list[Apart]()
        distances = list[Apart]()
        for _ in range(_ROUNDS):
            start.restore()
            plain_s.append(self._capture.seconds(partial(self._run, batch)))
            start.restore()
            outputs = self._run(plain_batch).tensors()
            noise.append((first_end.distance(), distance_between(outputs, first_outputs)))
            start.restore()
            replay_s.append(self._capture.seconds(fill_and_replay))
            outputs = graph.ran.tensors()
            distances.append((first_end.distance(), distance_between(outputs, first_outputs)))
        proof = _Proof(
            plain_ms=1000 * statistics.median(plain_s),
            replay_ms=1000 * statistics.median(replay_s),
            noise=(max(pair[0] for pair in noise), max(pair[1] for pair in noise)),
            distance=(max(pair[0] for pair in distances), max(pair[1] for pair in distances)),
            moved=moved,
        )
        return graph, proof

    def _describe(self) -> State:
        """What a captured step has fixed: where all lies, which weights are trained, by which
        numbers, and what a watched module holds.

        Rates are left out where each replay reads them.
        """
        step = self._step
        facts: State = {
            # first: of several differences the first is named
            _TRAINED: list(map(_trained_of, step.optimizer.param_groups)),
            "gradient_clip_val": step.side.longest_gradient,
            "a weight's place": _places_of(step.module),
            "the optimizer's state": [tensor.data_ptr() for tensor in optimizer_states(step)],
            "the task's state": [tensor.data_ptr() for tensor in task_states(step)],
        }
        for number, group in enumerate(step.optimizer.param_groups):
            settings = {**group, "params": None}
            if self._rates is not None:
                del settings["lr"]
            facts[f"optimizer.param_groups[{number}]"] = settings
        return facts if self._watch is None else facts | state_of_module(step.module)

    def _turn_off(self, why: str) -> None:
        # Later than that the training has come far with plain steps or replays: it goes on.
        if self._must_replay and not self.evidence:
            raise UserError("graph", f"on, but {why}", hint="Leave it at auto.")
        self.why_off = why
        self._step.rates = None
        self._forget_graphs()
        self._buffers.clear()
        print(f"step graph: off, {why}; plain steps train", flush=True)


def _trained_of(group: dict[str, Any]) -> list[bool]:
    """Which weights of a group of the optimizer are trained."""
    return [weight.requires_grad for weight in group["params"]]


def _places_of(module: nn.Module) -> list[int]:
    """The addresses of all weights and buffers.

    Asked once a stretch, where `modules()` would take longer than all else that is asked.
    """
    places = list[int]()
    seen = dict[nn.Module, None]()
    parts: list[nn.Module | None] = [module]
    for part in parts:  # which grows meanwhile
        if part is None or part in seen:
            continue
        seen[part] = None
        if part._modules:
            parts += part._modules.values()
        for kept in (part._parameters, part._buffers):
            if kept:
                places += [tensor.data_ptr() for tensor in kept.values() if tensor is not None]
    return places
