"""Operators that a training step dispatches, and how often it reads the device: what a GPU would
launch and wait for.

Both are counted by a dispatch mode on a CPU, so any machine shows them. Twelve layers as in
BERT-base, but narrow; without dropout, which CPUs and GPUs draw in different ways. Views and
allocations are not counted, they launch nothing. Attention is one operator on both sides, as on a
GPU: ours is replaced by one, the library's is the fused one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, library
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.claim import Claim, bounded, quiet
from flatout.data import TextData
from flatout.data.samples.tweets import TweetsConfig
from flatout.data.tokens.vocabulary import VocabularyConfig, VocabularyKind
from flatout.engine import FastLoop
from flatout.engine.optimizer import OptimConfig
from flatout.models.encoder import attention
from flatout.models.encoder.network import Transformer
from flatout.models.encoder.transformer import Compute, TransformerConfig
from flatout.tasks import Classifier

_COUNTED_STEP = 2
"""Counted from 0; the steps before make state and caches."""
_BATCH = 32
_ENCODER: dict[str, Any] = {"hidden": 96, "layers": 12, "heads": 12}
_EXACT: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0}
_ALLOCATIONS = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "detach",
}
_READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select"}


class Counter(TorchDispatchMode):
    """Counts what launches a kernel, and what brings a number to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += reads_device(func)
        self.launches += launches_kernel(func)
        return func(*args, **(kwargs or {}))


def launches_kernel(operator: OpOverload) -> bool:
    """Whether an operator computes on the device; views, allocations and reads do not."""
    outputs = [each.alias_info for each in operator._schema.returns]
    is_view = bool(outputs) and all(each is not None and not each.is_write for each in outputs)
    name = operator._schema.name.rpartition("::")[2]
    return not is_view and name not in _ALLOCATIONS and name not in _READS


def reads_device(operator: OpOverload) -> bool:
    """Whether the host waits for a number of the device."""
    return operator._schema.name.rpartition("::")[2] in _READS


def dispatch_claims() -> Iterator[Claim]:
    """Operators against the Trainer's in bf16, as on a GPU; then reads of the device in each number
    format.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    formats = {"bf16": "bf16-mixed", "fp32": "32-true", "fp16": "16-mixed"}
    with quiet():
        counted = {name: ours_counted(precision) for name, precision in formats.items()}
        theirs = {name: theirs_counted(bf16=name == "bf16") for name in ("bf16", "fp32")}
    launches = [
        f"{name} {counted[name].launches} against {theirs[name].launches}" for name in theirs
    ]
    share = 100 * counted["bf16"].launches / theirs["bf16"].launches
    note = f"12 layers, {', '.join(launches)}"
    yield bounded(
        "operators of a training step in bf16, of the Trainer's", share, "%", most=60, note=note
    )
    for name, counter in counted.items():
        note = f"the Trainer: {theirs[name].reads}" if name in theirs else "with a scaler"
        yield bounded(
            f"reads of the device in a training step, {name}",
            float(counter.reads),
            "",
            most=0.0,
            note=note,
        )


def ours_counted(precision: str) -> Counter:
    """A step of the fast loop over flat batches, with the checks that a GPU makes itself."""
    counter = Counter()
    loop = FastLoop()
    loop.checks_on_host = False
    task = Classifier(
        TransformerConfig(**_ENCODER, **_EXACT), optim=OptimConfig(lr=1e-4), total_steps=8
    )
    settings: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":
        settings = {
            "plugins": [
                MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
            ]
        }
    trainer = L.Trainer(
        max_steps=_COUNTED_STEP + 1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        callbacks=[loop, _Counting(counter)],
        **settings,
    )
    with _one_operator():
        trainer.fit(task, datamodule=_data())
    return counter


def theirs_counted(*, bf16: bool) -> Counter:
    """A step of transformers' Trainer over the same rows in padded batches."""
    from benchmarks.usual_bert import Row, train

    data = _data()
    counter = Counter()
    data.prepare_data()
    data.setup()
    split = data.store.splits["train"]
    info = data.info
    tokens = split.ragged("tokens")
    targets = split.fixed("targets")
    rows = [
        Row(tokens.values[tokens.offsets[i] : tokens.offsets[i + 1]].tolist(), int(targets[i]))
        for i in range(_BATCH * (_COUNTED_STEP + 1))
    ]
    config = TransformerConfig(**_ENCODER, **_EXACT, compute=Compute.padded)
    task = Classifier(config)
    network: Any = task.build(info)
    network.net.set_attn_implementation("sdpa")
    settings: dict[str, Any] = {"counter": (counter, _COUNTED_STEP), "use_cpu": True, "bf16": bf16}
    train(network.net, rows, network.padding_id, _COUNTED_STEP + 1, **settings)
    return counter


def _data() -> TextData:
    vocabulary = VocabularyConfig(size=2_000, kind=VocabularyKind.wordpiece)
    return TextData(sample=TweetsConfig(rows=400), batch_size=_BATCH, vocabulary=vocabulary, seed=0)


class _Counting(L.Callback):
    """Counts one step, from its batch to the end of the optimizer's step."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == _COUNTED_STEP:
            self.counter.__enter__()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == _COUNTED_STEP:
            self.counter.__exit__(None, None, None)


@library.custom_op("flatout_bench::attend", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Stands for the kernel of rows of unequal length: its numbers are of no matter here."""
    return torch.zeros_like(query)


@library.custom_op("flatout_bench::attend_backward", mutates_args=())
def _attend_backward(
    incoming: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


_attend.register_autograd(
    lambda ctx, incoming: _attend_backward(incoming, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@contextmanager
def _one_operator() -> Iterator[None]:
    """Flat encoders take the kernel of a GPU, which stands in here as one operator."""
    varlen = {attention.Kernel.varlen: lambda parts, *_, **__: _attend(*parts)}
    with (
        mock.patch.dict(attention.KERNELS, varlen),
        mock.patch.object(Transformer, "_kernel", lambda self, device: attention.Kernel.varlen),
    ):
        yield
