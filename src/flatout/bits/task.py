"""Encodings to 2-grams: several labels a record, a threshold found on the validation records,
scores a record.

The model answers the grams of the plain text and, beside them, every gram that was hashed; both
have a loss. Training texts can also be *recombined*: the given name of one record with the surname
of a second and the birthday of a third. The encoding of that text is not known, but none is needed
to train the part that makes answers of detected grams.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.bits.grams import FIELD_END, GramIndex, encode_targets, join_fields
from flatout.bits.info import BitInfo, GramLabels
from flatout.bits.ridge import choose_ridge_share, finished_answers, start_at_ridge
from flatout.bits.scores import NAMES, GramMetrics
from flatout.data.batches.feed import Feeds
from flatout.data.batches.flat_batch import FlatBatch, multi_hot_of_counts
from flatout.data.batches.kept_tensors import count_up
from flatout.data.info import DataInfo
from flatout.errors import UserError, check_settings, setting
from flatout.models.bit_mlp import BitMLP
from flatout.models.contract import ModelConfig
from flatout.run_log import RunLog
from flatout.tasks.task import Forward, Task, real_rows

_MOST_WEIGHT = 20.0
_FOCUS = 2.0
_RECOMBINED = 65_536
_MOST_GRAMS = 2**26  # of all recombined texts: 256 MB
_TEXTS_READ = 131_072
GramLoss = StrEnum("GramLoss", "bce weighted soft_margin focal")


@dataclass(kw_only=True, slots=True)
class GramsConfig:
    """The loss of a model that reads grams off encodings."""

    loss: GramLoss = setting(
        GramLoss.bce,
        "bce: cross-entropy; weighted: rare grams weigh more; soft_margin: a smooth hinge with"
        " margin 1; focal: sure answers weigh less.",
    )
    detector_weight: float = setting(
        1.0, "Weight of the hashed grams' loss, where detectors are trained.", least=0
    )
    recombine: float = setting(
        0.5, "Recombined texts a step, for each record of the batch; 0: none.", least=0
    )
    exposure: bool = setting(True, "Whether an exposure report is written when training is over.")

    def __post_init__(self) -> None:
        check_settings(self, "task")


class GramDecoder(Task):
    """Trains a model on encodings and their grams."""

    settings = GramsConfig
    metric_names = NAMES
    counts_tokens = False
    smaller_rows = "Take a smaller model, such as model.widths=[128], or set precision=bf16."
    is_finished = False  # whether training is over, so that whatever votes in the end is asked
    weights_C: Tensor | None
    _step_began_at: int | Tensor = 0  # number of the recombined text
    _is_within_step = False

    def take_labels(self, labels: GramLabels) -> None:
        self.labels = labels
        self.metrics = GramMetrics()
        self.recombined: list[Recombined] = []  # in a list, so that it is no submodule and no state
        weights = gram_weights(labels) if self.config.loss is GramLoss.weighted else None
        self.register_buffer("weights_C", weights, persistent=False)

    def take_info(self, info: object) -> None:
        if not isinstance(info, BitInfo):
            raise UserError(
                "GramDecoder",
                f"{type(info).__name__} has no grams",
                hint="Use Classifier for texts and Tagger for tags.",
            )
        self.take_labels(info.labels)

    def prepare_training(self, feeds: Feeds, log: RunLog, seed: int) -> dict[str, Any]:
        """Ridge regression: the baseline, and where the network's detectors start."""
        if self.info is None:
            return {}
        facts = start_at_ridge(self.model, self.labels, self.info, feeds, log)
        if self._recombine(feeds, seed + feeds.train.plan.rank):
            evidence = f"fields of the {self.labels.num_rows:,} training texts, recombined"
            value = f"{self.config.recombine:g} a record"
            log.decision(
                "recombined texts", value, "they teach the composer without an encoding", evidence
            )
        return facts

    def prepare_probe(self, feeds: Feeds, seed: int) -> None:
        """Detectors are as fast from any start; recombined texts take part in each step."""
        self._recombine(feeds, seed)

    def _recombine(self, feeds: Feeds, seed: int) -> bool:
        """Make texts of people that do not exist, from the fields of the training records.

        False if the model has no use for them.
        """
        has_detectors = isinstance(self.model, BitMLP) and self.model.detectors is not None
        if not self.config.recombine or not has_detectors:
            return False
        texts = recombined_texts(self.info.texts("train").slice(0, _TEXTS_READ), _RECOMBINED, seed)
        ids, lengths = encode_targets(texts, GramIndex(self.labels.hashed, is_frozen=True))
        # Their rows have one length: a very long one would fill the memory of the device.
        counts = torch.from_numpy(lengths[: _MOST_GRAMS // max(1, lengths.max())].astype(np.int64))
        grams = torch.from_numpy(ids[: int(counts.sum())])
        self.recombined.append(Recombined(grams, counts, feeds.train.device))
        return True

    def tune_answers(self, feeds: Feeds, log: RunLog) -> dict[str, Any]:
        self.is_finished = True
        self.eval()
        choose_ridge_share(self.model, self.answers, self.labels.num_outputs, feeds.validation, log)
        return {}

    def build_model(self, config: ModelConfig, info: DataInfo) -> nn.Module:
        assert isinstance(info, BitInfo)  # `take_info` has refused any other
        return config.build(
            num_inputs=info.num_inputs, is_set=info.is_set, **self.labels.network_sizes()
        )

    @property
    def threshold(self) -> float:
        """Least probability of a gram that is answered; from the last validation."""
        return self.metrics.threshold

    def step_tensors(self) -> list[Tensor]:
        return [texts.next for texts in self.recombined]

    def training_loss(self, batch: FlatBatch, model: Forward | None = None) -> Tensor:
        """The loss of a batch and of the recombined texts that go with it."""
        network = self.model
        count = self._recombined_of(batch) if self.recombined else 0
        if not count or not isinstance(network, BitMLP):
            return super().training_loss(batch, model)
        forward: Callable[..., Tensor] = network if model is None else model
        if batch.is_buffer:
            self.recombined[0].choose_on_device()
        texts = self.recombined[0].take(count)
        num_labels = self.labels.num_outputs
        if self._may_join_rows(network, batch.tokens.device):
            num_known = len(texts.counts)
            targets = self._join_targets(texts, batch)
            outputs = forward(batch, targets[:num_known, num_labels:])
            outputs = real_rows(outputs, batch, num_known)
            targets = real_rows(targets, batch, num_known)
            return self._sum_of_losses(outputs, targets, num_known) / batch.step_rows
        outputs = real_rows(forward(batch), batch)
        targets = real_rows(batch.multi_hot(outputs.shape[1]), batch)
        grams = multi_hot_of_counts(texts.ids, texts.counts, self.labels.num_targets)
        composed = network.compose(grams[:, num_labels:])
        total = self._sum_of_losses(outputs, targets)
        total = total + self.sum_losses(composed, grams[:, :num_labels])
        return total / batch.step_rows

    def loss(self, outputs: Tensor, batch: FlatBatch) -> Tensor:
        outputs = real_rows(outputs, batch)
        targets = real_rows(batch.multi_hot(outputs.shape[1]), batch)
        return self._sum_of_losses(outputs, targets) / batch.step_rows

    def _may_join_rows(self, network: BitMLP, device: torch.device) -> bool:
        """Whether records and recombined texts go through the composer in one pass."""
        # A GPU waits for the host, which launches half as many operators then. A CPU would save no
        # time, and draw other numbers for dropout than in two passes. Batch normalisation takes
        # the means of records by themselves, as there are no other rows in a validation.
        return device.type != "cpu" and not network.normalises_over_rows

    def _join_targets(self, texts: RaggedGrams, batch: FlatBatch) -> Tensor:
        """`[R + B, C + H]` zeros and ones: of recombined texts, then of a batch."""
        assert batch.targets is not None
        assert batch.target_offsets is not None
        ids = torch.cat([texts.ids, batch.targets])
        counts = torch.cat([texts.counts, batch.target_offsets.diff()])
        return multi_hot_of_counts(ids, counts, self.labels.num_targets)

    def _sum_of_losses(self, outputs: Tensor, targets: Tensor, num_known: int = 0) -> Tensor:
        """The losses of all rows. The first `num_known` have no detections."""
        num_labels = self.labels.num_outputs
        total = self.sum_losses(outputs[:, :num_labels], targets[:, :num_labels])
        if outputs.shape[1] > num_labels:  # a model that trains its detectors answers them as well
            detected = outputs[num_known:, num_labels:].float()
            hashed = targets[num_known:, num_labels:]
            losses = F.binary_cross_entropy_with_logits(detected, hashed, reduction="sum")
            total = total + self.config.detector_weight * (losses / num_labels)
        return total

    def begin_step(self) -> None:
        if self.recombined:
            self._step_began_at = self.recombined[0].mark()
            self._is_within_step = True

    def after_optimizer_step(self, uncounted: int = 0) -> None:
        self._is_within_step = False
        super().after_optimizer_step(uncounted)

    def reset_step(self) -> None:
        """Back to the texts that the step began with: its passes are repeated."""
        if self.recombined:
            self.recombined[0].go_back(self._step_began_at)

    def _recombined_of(self, batch: FlatBatch) -> int:
        """How many recombined texts go with a batch; pieces of one share what the whole
        would take.
        """
        before, whole = batch.cut_from or (0, batch.num_real)
        wanted = max(1, round(self.config.recombine * whole))
        if batch.cut_from is None:
            return wanted
        if before == 0:
            self.recombined[0].ready(wanted)
        wanted = min(wanted, len(self.recombined[0].widths))
        return wanted * (before + batch.num_real) // whole - wanted * before // whole

    def position_state(self) -> dict[str, Any]:
        if not self.recombined:
            return {}
        place = self._step_began_at if self._is_within_step else self.recombined[0].mark()
        return {"recombined": int(place)}

    def load_position_state(self, of_ranks: list[dict[str, Any]], rank: int) -> None:
        if self.recombined:
            self.recombined[0].place = of_ranks[min(rank, len(of_ranks) - 1)]["recombined"]

    def judge(self, batch: FlatBatch) -> Tensor:
        outputs = real_rows(self.answers(batch), batch)
        targets = real_rows(batch.multi_hot(self.labels.num_outputs), batch)
        probabilities = outputs.sigmoid()
        self.metrics.update(probabilities, targets, self.kept_rows(batch))
        self.add_answers(probabilities, targets.long())
        return self.sum_losses(outputs, targets)

    def answer(self, batch: FlatBatch) -> dict[str, Tensor]:
        return {"probabilities": real_rows(self.answers(batch), batch).sigmoid()}

    def start_judging(self, split: str) -> None:
        # The test has no say in the threshold: it is judged at that of the last validation.
        self.metrics.fixed_threshold = self.threshold if split == "test" else None
        self.metrics.reset()

    def answers(self, batch: FlatBatch) -> Tensor:
        """`[B, C]` logits of the answers; when training is over, as a finished model gives them."""
        num_outputs = self.labels.num_outputs
        if self.is_finished:
            return self.answer_in_pieces(
                batch, lambda part: finished_answers(self.model, num_outputs, part)
            )
        return self.outputs(batch)[:, :num_outputs].float()

    def sum_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum over records of the mean loss of their answers; override it for another loss."""
        return (
            gram_loss(self.config.loss, outputs.float(), targets, self.weights_C)
            / self.labels.num_outputs
        )


def gram_loss(
    kind: GramLoss, logits: Tensor, targets: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Sum of the losses of all answers."""
    if kind is GramLoss.soft_margin:
        return F.softplus(1 - logits * (2 * targets - 1)).sum()
    if kind is GramLoss.focal:
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return ((logits.sigmoid() - targets).abs() ** _FOCUS * losses).sum()
    return F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights, reduction="sum")


def gram_weights(labels: GramLabels) -> Tensor:
    """Weight of a gram that is there against one that is not: the root of absent / present, at most
    20.
    """
    counts = torch.tensor(labels.counts, dtype=torch.float32).clamp(min=1)
    return ((labels.num_rows - counts).clamp(min=1) / counts).sqrt().clamp(1.0, _MOST_WEIGHT)


def recombined_texts(texts: pa.Array, count: int, seed: int) -> pa.Array:
    """`count` raw texts made of fields of different records; `texts` hold their fields parted by
    FIELD_END.
    """
    random = np.random.Generator(np.random.Philox(key=[seed, 1]))
    fields = pc.split_pattern(texts, FIELD_END)
    num_fields = len(fields[0].as_py())
    values = fields.flatten()
    chosen = [
        random.integers(0, len(texts), count) * num_fields + number for number in range(num_fields)
    ]
    return join_fields([values.take(pa.array(places)) for places in chosen])


@dataclass(frozen=True, slots=True)
class RaggedGrams:
    """The grams of some texts."""

    ids: Tensor  # of all texts, one after the other; some are no grams
    counts: Tensor  # [R] how many ids each text has


class Recombined:
    """Grams of texts that were put together from parts of the training texts, taken round and
    round.

    The host chooses the next texts, until steps are captured: then the device does. Texts have rows
    of one length: of 1 and 3 grams, 5 . . and 2 7 9, where a point is no gram.
    """

    def __init__(self, ids: Tensor, counts: Tensor, device: torch.device) -> None:
        """`ids`: grams of all texts, one after the other; `counts`: how many each text has."""
        width = int(counts.max())
        is_gram_NW = torch.arange(width) < counts.unsqueeze(1)
        ids_NW = torch.full(is_gram_NW.shape, torch.iinfo(torch.int32).max, dtype=ids.dtype)
        ids_NW[is_gram_NW] = ids
        self.ids_NW = ids_NW.to(device)
        self.widths = torch.full_like(counts, width, device=device)
        # The text that is taken next. None: the number on the device counts.
        self.place: int | None = 0
        self.next = torch.zeros((), dtype=torch.int64, device=device)

    def choose_on_device(self) -> None:
        """Let the device choose from now on, as captured steps run nothing on the host."""
        if self.place is not None:
            self.next.fill_(self.place)
            self.place = None

    def ready(self, count: int) -> int:
        """How many of so many texts there are; starts again where fewer are left."""
        num_texts = len(self.widths)
        count = min(count, num_texts)
        if self.place is None:
            self.next.masked_fill_(self.next > num_texts - count, 0)
        elif self.place > num_texts - count:
            self.place = 0
        return count

    def take(self, count: int) -> RaggedGrams:
        """The next texts."""
        count = self.ready(count)
        if self.place is None:
            places_R = self.next + count_up(count, self.next.device)
            ids_RW = self.ids_NW.index_select(0, places_R)
            self.next += count
        else:
            ids_RW = self.ids_NW[self.place : self.place + count]
            self.place += count
        return RaggedGrams(ids_RW.flatten(), self.widths[:count])

    def mark(self) -> int | Tensor:
        """The text that is taken next, to go back to."""
        return self.next.clone() if self.place is None else self.place

    def go_back(self, mark: int | Tensor) -> None:
        if isinstance(mark, Tensor):
            self.next.copy_(mark)
        else:
            self.place = mark
