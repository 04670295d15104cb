"""Trainings whose steps are captured elsewhere, against the same trainings of plain steps."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import lightning as L
import numpy as np
import pyarrow as pa
import torch
from benchmarks.card import every_model
from benchmarks.card.every_model import BITS, OPTIM, Case, Parts
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

import train as train_command
from flatout import BitMLPConfig, OptimConfig, PeopleConfig, RNNConfig, TextCNNConfig
from flatout.bits import BitData, GramDecoder
from flatout.bits.task import GramsConfig
from flatout.callbacks import ExactCheckpoint
from flatout.data import SequenceData, TextData
from flatout.data.batches.flat_batch import FlatBatch
from flatout.data.batches.shapes import Shapes
from flatout.data.batches.signatures import tensors_of
from flatout.distributed.ranks import Ranks
from flatout.engine import FastLoop, graph_choice, step_graph
from flatout.engine.device_rates import DeviceRates
from flatout.engine.step import Step
from flatout.engine.step_graph import StepGraphs
from flatout.engine.step_ring import StepRing
from flatout.engine.step_snapshot import tensors_of_step
from flatout.engine.step_watch import find_other_number
from flatout.errors import UserError
from flatout.models.contract import Network
from flatout.models.textcnn import TextCNN
from flatout.tasks import Classifier, SequenceRegressor
from tests.data.recordings import uneven_recordings
from tests.elsewhere.capture import (
    Captured,
    ElsewhereCapture,
    Recording,
    add_capture,
    address_of,
)
from tests.elsewhere.device import NAME, OneDevice, There, add_device
from tests.elsewhere.steps import with_kernels_of_a_gpu
from tests.tasks.test_plain_trainer import quiet_trainer

RESULTS = "graphs.json"


def _several_labels(times: int) -> Parts:
    """Texts with none to three labels each."""
    random = np.random.default_rng(3)
    words = [f"word{number}" for number in range(40)]
    texts = [" ".join(random.choice(words, random.integers(2, 12))) for _ in range(64 * times)]
    labels = [sorted({*random.choice(list("abcd"), random.integers(0, 4))}) for _ in texts]
    table = pa.table({"text": texts, "labels": labels})
    data = TextData(source=table, text="text", label="labels", problem="multi", batch_size=8)
    return data, Classifier(TextCNNConfig(embedding=8, filters=4), optim=OPTIM)


def _bits_alone(times: int) -> Parts:
    """Bit strings without texts that are recombined on the host."""
    data = BitData(sample=PeopleConfig(rows=100 * times), batch_size=16, **BITS)
    settings = GramsConfig(exposure=False, recombine=0.0)
    return data, GramDecoder(BitMLPConfig(widths=[8]), settings, OPTIM)


def _deberta(times: int) -> Parts:
    """Rows of distances, whose activations are kept."""
    return every_model._encoder(times, family="deberta-v2")


def _recordings_of_any_length(times: int) -> Parts:
    """Chunks whose last ones are shorter, as recordings differ in length."""
    columns = uneven_recordings(12, shortest=10, longest=40)
    data = SequenceData(
        source=columns, features=["a"], target="y", group=["run"], chunk=8, batch_size=2
    )
    return data, SequenceRegressor(RNNConfig(hidden=8, smoothing="ema"), optim=OPTIM)


def _thawing(times: int) -> Parts:
    """A layer and the embeddings are frozen at first, and join the training amid epochs."""
    return every_model._encoder(times, freeze_layers=1, unfreeze_epochs=2.25)


def _by_sgd(times: int) -> Parts:
    data = TextData(sample=replace(every_model.HEADLINES, rows=64 * times), batch_size=8)
    optim = OptimConfig(name="sgd", lr=0.01)
    return data, Classifier(TextCNNConfig(embedding=8, filters=4), optim=optim)


class CountsItsPasses(nn.Module, Network):
    """A network of somebody's, whose passes read a number of the host that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(5_000, 8)
        self.head = nn.Linear(8, 12)
        self.passes = 0

    def forward(self, batch: FlatBatch) -> Tensor:
        self.passes += 1
        hidden = self.bag(batch.tokens.long(), batch.offsets[:-1])
        answers: Tensor = self.head(hidden) * (1 + 0.5 / self.passes)
        return answers


def _network_of_ones_own(times: int) -> Parts:
    data = TextData(sample=replace(every_model.HEADLINES, rows=64 * times), batch_size=8)
    return data, Classifier(CountsItsPasses(), optim=OPTIM)


CASES = {
    **every_model.CASES,
    "bert that thaws": Case(_thawing),
    "sgd": Case(_by_sgd),
    "deberta whose activations are kept": Case(_deberta),
    "recordings of any length": Case(_recordings_of_any_length),
    "several labels": Case(_several_labels),
    "bits without recombined texts": Case(_bits_alone),
    "a network of one's own": Case(_network_of_ones_own),
}
IN_SOAK = (
    "bert",
    "bert in fp32",
    "bilstm",
    "bits without recombined texts",
    "deberta whose activations are kept",
    "eurobert",
    "forecast",
    "gru",
    "labels of recordings",
    "largest of windows",
    "modernbert",
    "mpnet",
    "rnn",
    "rnn with a carried state",
    "several labels",
    "sgd",
    "tags",
    "window mlp",
)
"""Cases whose kinds of batches and layers others have as well."""
NEVER_REPLAYED = 10**9
"""So many first steps are plain: on the same buffers as replays, which no training gets to."""
NAMES: dict[str, Any] = {"fp16": "16-mixed", "bf16": "bf16-mixed"}


@dataclass
class Trained:
    """What a training has left."""

    weights: Tensor
    losses: list[float]
    replayed: int
    steps: int
    summary: str
    at_once: int = 0
    skipped: tuple[int, ...] = ()


class KeepLosses(L.Callback):
    """The losses of all steps, and what the graphs say at the end."""

    def __init__(self, loop: FastLoop) -> None:
        self.loop = loop
        self.losses: list[float] = []
        self.replayed = 0
        self.at_once = 0
        self.summary = "none"

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.losses += self.loop.take_losses()[0]

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.loop.graphs is not None:
            self.replayed = self.loop.graphs.counts.replayed
            self.at_once = self.loop.graphs.counts.at_once
            self.summary = self.loop.graphs.summary()


def train(
    name: str,
    graph: str,
    *,
    plain_first: int = 3,
    epochs: int = 3,
    callbacks: Sequence[L.Callback] = (),
    resume: Path | None = None,
    not_finite: str = "stop",
    **settings: Any,
) -> Trained:
    """Train a case; `plain_first`: its first steps that are plain, on the buffers of graphs.

    `settings`: further arguments of the Trainer.
    """
    step_graph._PLAIN_FIRST = plain_first
    case = CASES[name]
    scaler = torch.amp.GradScaler("elsewhere", init_scale=2.0**8)
    plugins = []
    if case.precision != "fp32":
        kept = scaler if case.precision == "fp16" else None
        plugins = [MixedPrecision(NAMES[case.precision], "elsewhere", kept)]
    torch.manual_seed(5)
    data, task = case.make(1)
    loop = FastLoop(graph=graph, not_finite=not_finite)
    keep = KeepLosses(loop)
    trainer = quiet_trainer(
        Path(tempfile.mkdtemp()),
        max_epochs=epochs,
        limit_train_batches=8,
        gradient_clip_val=0.5,
        callbacks=[loop, keep, *callbacks],
        enable_progress_bar=any(isinstance(each, ProgressBar) for each in callbacks),
        enable_checkpointing=any(isinstance(each, Checkpoint) for each in callbacks),
        accelerator="auto",
        strategy=OneDevice(),
        plugins=plugins,
        **{"limit_val_batches": 0, **settings},
    )
    trainer.fit(task, datamodule=data, ckpt_path=resume)
    weights = torch.cat([weight.detach().cpu().float().flatten() for weight in task.parameters()])
    return Trained(
        weights,
        keep.losses,
        keep.replayed,
        trainer.global_step,
        keep.summary,
        keep.at_once,
        tuple(loop.skipped),
    )


def compare_some(folder: Path) -> None:
    """What a case of each way of batching gives, and all that no graph takes."""
    _compare_cases(folder, [name for name in CASES if name not in IN_SOAK])


def compare_others(folder: Path) -> None:
    """The same of the cases that take minutes together."""
    _compare_cases(folder, IN_SOAK)


def _compare_cases(folder: Path, names: Sequence[str]) -> None:
    begin_elsewhere()
    results = compare_each(names, _compare)
    (folder / RESULTS).write_text(json.dumps(results), encoding="utf-8")


def compare_each(
    names: Iterable[str], compare: Callable[[str], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """What each case gives, by name: facts, the reason of a refusal, or an error."""
    results = {}
    for name in names:
        try:
            results[name] = compare(name)
        except UserError as error:
            results[name] = {"said": str(error), "replayed": 0}
        except Exception:
            # Of any class: the test of this case shows it, and the cases after it are looked at.
            results[name] = {"error": traceback.format_exc()}
    return results


def begin_elsewhere() -> None:
    """The device, with captures, in this process."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    add_device()
    add_capture()
    with_kernels_of_a_gpu()


@contextmanager
def auto_for_all() -> Iterator[None]:
    """`graph=auto` takes trainings as short as these, however fast their replays are."""
    with (
        mock.patch.object(graph_choice, "_LEAST_STEPS", 2),
        mock.patch.object(StepGraphs, "_is_slower", lambda *unused: False),
    ):
        yield


def _compare(name: str, graph: str = "on") -> dict[str, Any]:
    with capturing_twice() as twice:
        replayed = train(name, graph)
    plain = train(name, graph, plain_first=NEVER_REPLAYED)
    return {
        "at_once": replayed.at_once,
        "baked": twice.baked,
        "captured_twice": len(twice.shapes),
        "outside": sorted(twice.outside),
        "replayed": replayed.replayed,
        "steps": replayed.steps,
        "summary": replayed.summary,
        "has_equal_weights": torch.equal(replayed.weights, plain.weights),
        "has_equal_losses": replayed.losses == plain.losses,
        "different_losses": len(set(replayed.losses)),
        "replayed_of_plain": plain.replayed,
    }


@contextmanager
def capturing_twice() -> Iterator[Twice]:
    """Each step that is replayed first is captured again, and all is as before.

    The second batch of a shape has other rows, tokens and rates. Yields what is found.
    """
    found = Twice([], set(), set())

    def replay(self: StepGraphs[Any, Any], shape: Any, buffer: Any, batch: Any) -> Any:
        graph = self._graphs.get(shape)
        if graph is not None and shape not in found.shapes:
            found.shapes.add(shape)
            again = self._capture_step(shape, buffer)
            self._graphs[shape] = graph
            first, second = (cast(Captured, each.captured).recording for each in (graph, again))
            difference = find_other_number(first.asked, second.asked)
            found.baked.extend([difference] if difference else [])
            lying = _addresses_that_stay(self, buffer)
            found.outside.update(
                place for address, place in second.read.items() if address not in lying
            )
        return plain_replay(self, shape, buffer, batch)

    plain_replay = StepGraphs._replay
    with mock.patch.object(StepGraphs, "_replay", replay):
        yield found


def _addresses_that_stay(graphs: StepGraphs[Any, Any], buffer: FlatBatch) -> set[int]:
    """Where weights, states, the buffer and the numbers of each step lie."""
    step = graphs._step
    tensors = [*tensors_of_step(step), *tensors_of(buffer)]
    tensors += [*step.losses._inverse_norms.values(), *tensors_of(step.side._one)]
    tensors += [] if graphs._rates is None else graphs._rates._rates
    if isinstance(graphs.ring, StepRing):
        tensors += [*graphs.ring.tensors(), *graphs.ring.means()]
    if step.side.scaler is not None:
        tensors += tensors_of([step.side.scaler._scale, step.side.scaler._growth_tracker])
    return {address_of(tensor) for tensor in tensors}


@dataclass
class Twice:
    """What second captures of the same shapes have shown."""

    baked: list[str]
    """Plain numbers that are not those of the first capture, with the lines that have made them."""
    outside: set[str]
    """Lines that read tensors which are neither weights nor states, buffers or made in the step."""
    shapes: set[Any]


class Cut(L.Callback):
    """Ends a training behind a step, as an error would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *unused: Any) -> None:
        if trainer.global_step == self.step:
            raise CutError


class CutError(Exception):
    """A training was cut."""


RESUMED = ("textcnn", "bert that thaws", "window mlp", "tags")
CUT_AT = 13  # in the second of three epochs of eight steps; layers thaw before and behind it


def resume_all(folder: Path) -> None:
    """What trainings leave that were cut amid replays and resumed, beside whole ones."""
    begin_elsewhere()
    results: dict[str, Any] = {}
    for name in RESUMED:
        whole = train(name, "on")
        kept = folder / name
        with suppress(CutError):
            train(name, "on", callbacks=[_exact(kept), Cut(CUT_AT)])
        before_cut = ElsewhereCapture.made[-1].replays
        exact = _exact(kept)
        resumed = train(name, "on", callbacks=[exact], resume=exact.latest())
        results[name] = {
            "has_equal_weights": torch.equal(resumed.weights, whole.weights),
            # a checkpoint keeps the losses that were not read yet
            "has_equal_losses": resumed.losses == whole.losses[-len(resumed.losses) :],
            "losses": len(resumed.losses),
            "steps": resumed.steps,
            "steps_of_whole": whole.steps,
            "replays_before_cut": before_cut,
            "replayed": resumed.replayed,
        }
    (folder / RESULTS).write_text(json.dumps(results), encoding="utf-8")


def _exact(folder: Path) -> ExactCheckpoint:
    return ExactCheckpoint(folder, every_minutes=None)


def run_on_host(folder: Path) -> None:
    """`python -m train graph=on` elsewhere, with a network whose steps the host decides."""
    _run_elsewhere(
        folder, "model=transformer", "model.gradient_checkpointing=true", "model.hidden=16"
    )


def run_without_memory(folder: Path) -> None:
    """`python -m train graph=on` elsewhere, where no capture finds memory."""
    with without_memory():
        _run_elsewhere(folder, "model=textcnn", "model.embedding=8", "model.filters=4")


def _run_elsewhere(folder: Path, *words: str) -> None:
    begin_elsewhere()
    device = torch.device(NAME, 0)
    ranks: Any = Ranks
    ranks.device = lambda *unused: device
    ranks.lightning_settings = lambda *unused: {"strategy": OneDevice(), "devices": 1}
    data = ["data.sample.rows=200", "data.sample.eval_rows=20", "data.batch_size=8", "graph=on"]
    sys.argv[:] = ["train", f"output={folder}", *data, *words]
    train_command.main()


def plant_all(folder: Path) -> None:
    """What becomes of a training with each mistake planted: what was printed, or the facts."""
    begin_elsewhere()
    results = {name: plant() for name, plant in PLANTED.items()}
    (folder / RESULTS).write_text(json.dumps(results), encoding="utf-8")


def _differs(change: Callable[[], Any]) -> dict[str, Any]:
    """Whether a change of flatout's own code makes replays differ from plain steps."""
    with mock.patch.object(*change()):
        return _compare("textcnn")


def _bake_the_rate() -> dict[str, Any]:
    """The optimizer steps by plain numbers, which a capture repeats."""

    @contextmanager
    def plain_rates(self: DeviceRates) -> Iterator[None]:
        yield

    return _differs(lambda: (DeviceRates, "in_groups", plain_rates))


def _bake_a_count() -> dict[str, Any]:
    """A network counts its steps, divides its outputs by the number, and reads a tensor that lies
    loose.
    """
    steps = itertools.count(1)
    loose = torch.ones(1, device=NAME)

    def forward(self: TextCNN, batch: FlatBatch) -> Tensor:
        outputs = plain_forward(self, batch) * loose
        return outputs / next(steps)  # planted

    plain_forward = TextCNN.forward
    found = _differs(lambda: (TextCNN, "forward", forward))
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("# planted"))
    place = "elsewhere/graphs.py"
    return {**found, "line": f"{place}:{line}", "line_before": f"{place}:{line - 1}"}


def _keep_old_offsets() -> dict[str, Any]:
    """Rows of later batches begin where those of the first one did."""

    def fill(self: Shapes, buffer: FlatBatch, batch: FlatBatch) -> FlatBatch:
        offsets = buffer.offsets.clone()
        is_first = buffer.copied_from is None
        filled = plain_fill(self, buffer, batch)
        if not is_first:
            filled.offsets.copy_(offsets)
        return filled

    plain_fill = Shapes.fill
    before = train("bert", "on")
    with mock.patch.object(Shapes, "fill", fill):
        after = train("bert", "on")
    return {"has_equal_losses": before.losses == after.losses}


def _exchange_a_weight() -> dict[str, Any]:
    """A callback puts another tensor in a weight's place, and once gives one another group."""

    class Exchange(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            weight = cast(There, next(module.parameters()))
            weight.numbers = weight.numbers.clone()
            optimizer = trainer.optimizers[0]
            if trainer.current_epoch == 1:
                moved = optimizer.param_groups[0]["params"].pop()
                optimizer.add_param_group({"params": [moved], "lr_share": 0.5})

    replayed = train("textcnn", "on", callbacks=[Exchange()], epochs=4)
    plain = train("textcnn", "on", callbacks=[Exchange()], plain_first=NEVER_REPLAYED, epochs=4)
    return {
        "has_equal_losses": replayed.losses == plain.losses,
        "replayed": replayed.replayed,
        "captured": len(ElsewhereCapture.made[-2].captured),
    }


def _freeze_in_turn() -> dict[str, Any]:
    """A callback freezes a weight in every other step of a training whose layers thaw."""

    class FreezeInTurn(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any):
            weight = list(module.parameters())[-1]
            weight.requires_grad_(not weight.requires_grad)

    with auto_for_all():
        trained = train("bert that thaws", "auto", callbacks=[FreezeInTurn()])
    return vars(trained) | {"weights": None}


@contextmanager
def _asking_in_the_step(ask: Callable[[Tensor], object]) -> Iterator[None]:
    """Each step of a classifier asks for something with its loss."""

    def loss(self: Classifier, outputs: Tensor, batch: FlatBatch) -> Tensor:
        computed = plain_loss(self, outputs, batch)
        ask(computed)
        return computed

    plain_loss = Classifier.loss
    with mock.patch.object(Classifier, "loss", loss):
        yield


def _ask_in_the_step(ask: Callable[[Tensor], object]) -> dict[str, Any]:
    with _asking_in_the_step(ask), auto_for_all():
        return _compare("textcnn", "auto")


def _read_the_device() -> dict[str, Any]:
    """The loss is read within the step."""
    return _ask_in_the_step(float)


def _record_an_event() -> dict[str, Any]:
    """An event of a clock is recorded within the step."""
    event: Any = torch.cuda.Event
    with mock.patch.object(event, "record"):  # none can be made without a card
        return _ask_in_the_step(lambda loss: event.record(None))


def _lock_pages() -> dict[str, Any]:
    """Memory is page-locked within the step."""
    # none can be locked without a card
    with mock.patch.object(Tensor, "pin_memory", lambda tensor, *unused: tensor):
        return _ask_in_the_step(lambda loss: torch.zeros(1).pin_memory())


def _read_the_random_state() -> dict[str, Any]:
    """The state of random numbers is read within the step."""
    return _ask_in_the_step(lambda loss: torch.get_rng_state())


def _refuse(plant: Callable[[], Any]) -> dict[str, Any]:
    """What `graph=on` says of a training whose first capture or proof fails."""
    trained: Trained | None = None
    refusal = ""
    try:
        with plant():
            trained = train("textcnn", "on")
    except UserError as error:
        refusal = str(error)
    return {"refusal": refusal, "has_trained": trained is not None}


@contextmanager
def without_memory(captures: int = 0) -> Iterator[None]:
    """No capture finds memory but the first ones."""

    def capture(self: ElsewhereCapture, function: Callable[[], None]) -> Captured:
        if len(self.captured) < captures:
            return plain_capture(self, function)
        function()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    plain_capture = ElsewhereCapture.capture
    with mock.patch.object(ElsewhereCapture, "capture", capture):
        yield


def _forget_a_counter() -> dict[str, Any]:
    """The steps of a replay are not counted."""

    def finish(self: Step, loss: Tensor, norm: Tensor, **unused: bool) -> None:
        self.losses.values.append(loss)
        self.losses.norms.append(norm)

    with mock.patch.object(Step, "finish", finish):
        return vars(train("textcnn", "on")) | {"weights": None}


@contextmanager
def _repeating_random_numbers() -> Iterator[None]:
    """Each replay drops the same, which is not what a plain step drops."""
    state = torch.Generator().manual_seed(77).get_state()

    def replay(self: Recording) -> None:
        torch.set_rng_state(state)
        plain_replay(self)

    plain_replay = Recording.replay
    with mock.patch.object(Recording, "replay", replay):
        yield


def _repeat_random_numbers() -> dict[str, Any]:
    with _repeating_random_numbers(), auto_for_all():
        return _compare("textcnn", "auto")


def _run_out_of_memory() -> dict[str, Any]:
    """The second capture finds no memory."""
    with without_memory(captures=1):
        stopped = train("textcnn", "on")
    plain = train("textcnn", "on", plain_first=NEVER_REPLAYED)
    return vars(stopped) | {
        "weights": None,
        "has_equal_losses": stopped.losses == plain.losses,
    }


PLANTED: dict[str, Callable[[], dict[str, Any]]] = {
    "a baked rate": _bake_the_rate,
    "a baked count": _bake_a_count,
    "old offsets": _keep_old_offsets,
    "another weight": _exchange_a_weight,
    "a weight frozen in turn": _freeze_in_turn,
    "a read of the device": _read_the_device,
    "an event of a clock": _record_an_event,
    "page-locked memory": _lock_pages,
    "the random state": _read_the_random_state,
    "a forgotten counter": _forget_a_counter,
    "repeated random numbers": _repeat_random_numbers,
    "no memory for a capture": _run_out_of_memory,
    "on: no memory": partial(_refuse, without_memory),
    "on: repeated random numbers": partial(_refuse, _repeating_random_numbers),
    "on: a read of the device": partial(_refuse, partial(_asking_in_the_step, float)),
}
