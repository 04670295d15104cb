"""Masked words to the words that stood there: pretraining an encoder on texts without labels.

Each row gives the same share of its tokens, rounded, and one at least. Which ones is decided by a
hash of seed, epoch, row number and place. So a row is masked alike in any batch, on any device, in
any piece of a batch and in a resumed run, and otherwise in each epoch. How many are masked follows
from the lengths, which the host knows: nothing waits for the device. In the buffer of a captured
step there is room for as many as rows of any lengths can have; places left over have no target.
Most become the mask token, some a random one, the others stay (BERT: 80, 10 and 10 %). Only masked
places pass through what follows attention in the last layer, and through the head. Validation masks
the same tokens each time, whatever the seed, so that losses of several runs can be compared.

Shapes: T tokens, B rows, K masked tokens, V words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from flatout.data.batches.feed import Feeds
from flatout.data.batches.flat_batch import FlatBatch, cut_batch, rows_on_device
from flatout.data.batches.gather import TOKENS
from flatout.data.batches.kept_tensors import count_up
from flatout.data.info import DataInfo, TokenInfo
from flatout.data.tokens.subwords import PAIR, Subwords
from flatout.errors import UserError, check_settings, require, setting
from flatout.models.contract import ModelConfig
from flatout.models.encoder.transformer import Outputs, Transformer
from flatout.run_log import RunLog
from flatout.tasks.networks import build_text_network
from flatout.tasks.score_intervals import Interval, RowSums, bootstrap
from flatout.tasks.task import Forward, Task

Numbers = TypeVar("Numbers", int, Tensor)
NO_TARGET = -100  # the target of a place that counts in no loss
_BITS = 0xFFFFFFFF  # 32 bits of a hash
_FACTOR = 0x45D9F3B  # an odd number of 27 bits, by which a hash spreads its bits
# Added to a token's draw for the two further draws of a masked token: what it becomes (the mask
# token, a random one, or itself), and which random one.
_KIND = 0x1B873593
_WORD = 0x19D699A5
_LARGEST_LOSS = 700.0  # its exponential, the perplexity, is still a finite number
# what masked words are judged by, known before there is a network
METRICS = ("perplexity", "masked_accuracy")
# masked places whose logits are held at once in validation: each is as long as the vocabulary
_JUDGED_AT_ONCE = 4096


@dataclass(kw_only=True, slots=True)
class MaskedLanguageConfig:
    """Which tokens are masked, and what they become."""

    mask_share: float = setting(
        0.15, "Fraction of a row's tokens that is predicted, one at least.", above=0, below=1
    )
    mask_token_share: float = setting(
        0.8,
        "Fraction of these seen as the mask token.",
        least=0,
        most=1,
        example="1 task.random_token_share=0",
    )
    random_token_share: float = setting(
        0.1, "Fraction of these seen as a random token; others stay.", least=0, most=1
    )

    def __post_init__(self) -> None:
        check_settings(self, "task")
        total = self.mask_token_share + self.random_token_share
        require(
            total <= 1 + 1e-9,
            "task.random_token_share",
            f"{total:g} with task.mask_token_share",
            hint=(
                "Set task.mask_token_share and task.random_token_share so that they add up to 1 at"
                " most."
            ),
        )


class MaskedLanguageModel(Task[None]):
    """Trains an encoder to predict masked words."""

    settings = MaskedLanguageConfig
    metric_names = METRICS
    reads_rows = True
    is_special_V: Tensor
    start: Tensor
    masking: Masking
    masked_per_row = 1.0  # masked tokens of a training row on average, by which the loss is divided
    # loss, right answers and number of the masked tokens that were judged
    _sums: NDArray[np.float64]
    _read_share = 1.0
    _seed = 0
    _start = 0  # the number in `start`

    def take_info(self, info: DataInfo) -> None:
        if not isinstance(info, TokenInfo) or not isinstance(info.vocabulary, Subwords):
            raise UserError(
                "MaskedLanguageModel",
                f"{type(info).__name__} has no pieces of words",
                hint="Set data.vocabulary.kind=wordpiece, or data.tokenizer.",
            )
        encoder = info.vocabulary
        special_tokens = encoder.frame.size  # that each row has around its text
        if info.roles.join == PAIR:
            special_tokens += len(encoder.frame.parting)
        mask_id = encoder.require_mask("the tokenizer")
        self.masking = Masking(self.config, mask_id, encoder.size, special_tokens)
        largest_id = max(encoder.tokenizer.get_vocab().values())  # ids may have gaps
        is_special = np.zeros(1 + largest_id, np.bool_)
        is_special[encoder.special_ids()] = True
        self.register_buffer("is_special_V", torch.from_numpy(is_special), persistent=False)
        # on the device, as each replay of a captured step has to read that of its epoch
        self.register_buffer("start", torch.zeros((), dtype=torch.int64), persistent=False)
        lengths = info.store.splits["train"].lengths(TOKENS)
        counts = self.masking.counts(lengths)
        self.masked_per_row = max(1.0, float(counts.mean()))
        self._read_share = float(counts.sum() / max(1, lengths.sum()))

    def build_model(self, config: ModelConfig, info: DataInfo) -> nn.Module:
        network = build_text_network(config, info, Outputs([], "words"))
        if isinstance(network, Transformer):
            network.read_share = self._read_share
        return network

    def prepare_training(self, feeds: Feeds, log: RunLog, seed: int) -> dict[str, Any]:
        self._seed = seed
        why = "task.mask_share of the tokens of each row, one at least"
        evidence = f"{self.masked_per_row:.1f} a row; only these pass through the head"
        log.decision("masked tokens", f"{self._read_share:.1%}", why, evidence)
        return {}

    def on_train_epoch_start(self) -> None:
        self._begin_epoch()

    def training_loss(self, batch: FlatBatch, model: Forward | None = None) -> Tensor:
        self._begin_epoch()  # a resumed training starts amid an epoch
        masked = self.masking.mask(batch, self.is_special_V, self.start)
        return super().training_loss(masked, model)

    def _begin_epoch(self) -> None:
        """Let the hashes of tokens start with the seed and the epoch."""
        # Where only the speed of a step is measured there is no trainer.
        epoch = 0 if self._trainer is None else self._trainer.current_epoch
        start = start_of(self._seed, epoch + 1)
        if start != self._start:
            self._start = start
            self.start.fill_(start)

    def loss(self, outputs: Tensor, batch: FlatBatch) -> Tensor:
        assert batch.targets is not None
        total = self.sum_losses(outputs.float(), batch.targets)
        return total / (batch.step_rows * self.masked_per_row)

    def sum_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses of masked tokens in training; override it for another loss.

        A validation keeps the cross-entropy, of which its perplexity is made.
        """
        return F.cross_entropy(outputs, targets, reduction="sum", ignore_index=NO_TARGET)

    def mask(self, batch: FlatBatch, seed: int, epoch: int) -> FlatBatch:
        """The batch with its tokens masked, for an epoch of a seed."""
        is_special_V = self.is_special_V.to(batch.tokens.device)
        return self.masking.mask(batch, is_special_V, start_of(seed, epoch))

    def judge(self, batch: FlatBatch) -> Tensor:
        judged_K5 = self._judge_places(batch)
        judged_K3 = judged_K5[:, :3]
        if self.own_metrics:
            answers_K, targets_K = judged_K5[:, 3:].long().unbind(1)
            is_counted_K = targets_K != NO_TARGET
            self.add_answers(answers_K[is_counted_K], targets_K[is_counted_K])
        self._sums += judged_K3.double().sum(0).cpu().numpy()
        rows = self.kept_rows(batch)
        if rows is not None:
            counts = self.masking.counts(batch.lengths.numpy())[: batch.num_real]
            self._row_sums.add(rows.repeat_interleave(torch.from_numpy(counts)), judged_K3)
        return judged_K3[:, 0].sum().to(self._loss_sum.dtype) / self.masked_per_row

    def answer(self, batch: FlatBatch) -> dict[str, Tensor]:
        """The mean loss of each row's masked words: how well the network knows its language."""
        judged_K5 = self._judge_places(batch)
        counts = self.masking.counts(batch.lengths.numpy())[: batch.num_real]
        rows = np.repeat(np.arange(batch.num_real), counts)
        row_of_K = torch.from_numpy(rows).to(judged_K5.device)
        total_B = judged_K5.new_zeros(batch.num_real).index_add_(0, row_of_K, judged_K5[:, 0])
        return {"loss": total_B / torch.from_numpy(np.maximum(1, counts)).to(total_B)}

    def _judge_places(self, batch: FlatBatch) -> Tensor:
        """`[K, 5]`, a row for each masked token.

        Its loss, whether its answer is right, whether it counts, the answer, and the target.
        """
        count = int(self.masking.counts(batch.lengths.numpy()).sum())
        parts = cut_batch(batch, -(-count // _JUDGED_AT_ONCE))
        return torch.cat([self.answer_in_pieces(part, self._judge_part) for part in parts])

    def _judge_part(self, batch: FlatBatch) -> Tensor:
        if not self.masking.counts(batch.lengths.numpy())[: batch.num_real].any():
            return self._loss_sum.new_zeros(0, 5)
        masked = self.mask(batch, seed=0, epoch=0)
        assert masked.targets is not None
        logits_KV = self.model(masked).float()
        losses_K = F.cross_entropy(
            logits_KV, masked.targets, reduction="none", ignore_index=NO_TARGET
        )
        answers_K = logits_KV.argmax(-1)
        is_right_K = answers_K == masked.targets
        counts_K = masked.targets != NO_TARGET
        # ids of tokens are exact in fp32
        others = (is_right_K, counts_K, answers_K, masked.targets)
        return torch.stack([losses_K, *(other.to(losses_K) for other in others)], 1)

    def start_judging(self, split: str) -> None:
        self._sums = np.zeros(3)
        self._row_sums = RowSums(3)

    def judged(self) -> dict[str, float]:
        """The loss is that of a masked token; it replaces the loss of a mean row."""
        loss, right, count = self.over_ranks(self._sums)
        mean = float(loss / max(1, count))
        return {
            "loss": mean,
            "perplexity": math.exp(min(mean, _LARGEST_LOSS)),
            "masked_accuracy": float(right / max(1, count)),
        }

    def intervals(self) -> dict[str, Interval]:
        def values_of(sums: Tensor) -> dict[str, Tensor]:
            loss, right = (sums[..., :2] / sums[..., 2:]).unbind(-1)
            return {
                "loss": loss,
                "perplexity": loss.clamp(max=_LARGEST_LOSS).exp(),
                "masked_accuracy": right,
            }

        return bootstrap(self._row_sums.gathered(self.over_ranks), values_of)


@dataclass(frozen=True, slots=True)
class Masking:
    """Which tokens of a row are masked, and what they become.

    A row of 10 words and two special tokens, `mask_share` 0.15: 2 words are masked (1.5, rounded to
    the even number). Each token has a draw, a hash of 32 bits; the 2 words with the smallest are
    masked.
    """

    config: MaskedLanguageConfig
    mask_id: int
    vocabulary_size: int
    frame: int  # special tokens of a row, around its text and between the two of a pair

    def counts(self, lengths: NDArray[np.integer]) -> NDArray[np.int64]:
        """How many tokens are masked in rows of these lengths."""
        return self._counts(torch.from_numpy(lengths.astype(np.int64))).numpy()

    def _counts(self, lengths_B: Tensor) -> Tensor:
        words_B = (lengths_B - self.frame).clamp_min(0)
        wanted_B = (words_B.double() * self.config.mask_share).round().long()
        return torch.minimum(words_B, wanted_B.clamp_min(1))

    def num_places(self, batch: FlatBatch) -> int:
        """How many places are masked; in a buffer, how many rows of any lengths can have at most.

        One at least, as a network answers no empty batch.
        """
        is_even = batch.num_rows * batch.longest() == batch.num_tokens
        if not batch.is_buffer or is_even:
            lengths = batch.lengths[: batch.num_real].numpy()
            return max(1, int(self.counts(lengths).sum()))
        # Each filler row has a token at least. A row has half a place more by rounding, or a whole
        # one for a single word. Rows without all special tokens have fewer than are taken off here.
        share = self.config.mask_share
        words = batch.num_tokens - batch.num_rows + (1 - self.frame) * batch.num_real
        more = max(0.5, 1 - share, share * self.frame)
        return max(1, math.ceil(share * words + more * batch.num_real))

    def mask(self, batch: FlatBatch, is_special_V: Tensor, start: int | Tensor) -> FlatBatch:
        """The batch with tokens masked, and with the masked places and their targets `[K]`.

        `start`: see `start_of`. Special tokens stay as they are, without a target.
        """
        device = batch.tokens.device
        starts_B = batch.offsets[:-1]
        lengths_B = batch.offsets[1:] - starts_B
        rows_B = count_up(batch.num_rows, device)
        row_of_T = torch.repeat_interleave(rows_B, lengths_B, output_size=batch.num_tokens)
        place_T = count_up(batch.num_tokens, device) - starts_B[row_of_T]
        numbers_B = _mix(rows_on_device(batch) ^ start)
        draws_T = _mix(numbers_B[row_of_T] + place_T)
        is_special_T = is_special_V[batch.tokens]
        # One number sorts by row, then words before special tokens, then by draw: the row above bit
        # 33, whether it is special at bit 32, and the draw below.
        order_T = torch.argsort((row_of_T << 33) | (is_special_T.long() << 32) | draws_T)
        counts_B = self._counts(lengths_B).masked_fill(rows_B >= batch.num_real, 0)
        chosen_K, is_left_K = _places_in_order(starts_B, counts_B, self.num_places(batch))
        places_K = order_T[chosen_K.clamp_max_(batch.num_tokens - 1)]
        tokens_K = batch.tokens[places_K]
        stays_K = is_special_T[places_K] | is_left_K
        tokens_T = batch.tokens.clone()
        replacements_K = self._replacements(tokens_K, draws_T[places_K])
        tokens_T[places_K] = torch.where(stays_K, tokens_K, replacements_K)
        targets_K = tokens_K.long().masked_fill(stays_K, NO_TARGET)
        return replace(
            batch, tokens=tokens_T, targets=targets_K, target_offsets=None, places=places_K
        )

    def _replacements(self, tokens_K: Tensor, draws_K: Tensor) -> Tensor:
        """What masked tokens become: most the mask token, some a random one, others stay."""
        share_K = _mix(draws_K + _KIND).double() / (_BITS + 1)
        masked = self.config.mask_token_share
        words_K = (_mix(draws_K + _WORD) % self.vocabulary_size).to(tokens_K.dtype)
        changed_K = torch.where(
            share_K < masked + self.config.random_token_share, words_K, tokens_K
        )
        return changed_K.masked_fill(share_K < masked, self.mask_id)


def _places_in_order(starts_B: Tensor, counts_B: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """`[K]` the first few places of each row, and `[K]` which of them are left over.

    Rows lie in the order of their tokens' draws. Rows of 4 and 3 tokens, of which 2 and 1 are
    masked, with room for 5: places 0 1 4, and two left over behind all tokens.
    """
    ends_B = counts_B.cumsum(0)
    behind = starts_B.new_full((1,), torch.iinfo(torch.int32).max)
    shifts = torch.cat([starts_B - ends_B + counts_B, behind])
    counts = torch.cat([counts_B, room - ends_B[-1:]])
    numbers_K = count_up(room, starts_B.device)
    chosen_K = torch.repeat_interleave(shifts, counts, output_size=room) + numbers_K
    return chosen_K, numbers_K >= ends_B[-1]


def start_of(seed: int, epoch: int) -> int:
    """What the hash of a token starts with, besides its row and its place."""
    return _mix(_mix(seed) + epoch)


def _mix(values: Numbers) -> Numbers:
    """A hash of 32 bits; the product of 32 and 27 bits fits into int64 on every device."""
    values = values & _BITS
    for _ in range(2):
        values = ((values ^ (values >> 16)) * _FACTOR) & _BITS
    return values ^ (values >> 16)
