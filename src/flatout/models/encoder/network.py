"""An encoder of transformers and its head, over flat batches where its family allows it, else over
padded ones.

The model is the library's own class with its own modules, so weights load from it and save to it.
Where a family runs flat, its layers are replaced by ours (`layers.py`). This file does what comes
before and after them over `[T, H]` tokens. Positions begin again with each row, and a head that
reads first tokens gets only these. Other families get padded rows of like length through the
library's own layers. A row may hold the windows of a long text (`windows.py`). Each window is
answered like a row, and the answers are joined, so that the text's loss counts once.

Open this file to see how a batch goes through an encoder. What differs between families stands in
`families.py` and `facts.py`.

Shapes: T tokens, B rows, W windows, L longest row, H numbers a token, C outputs, K places of words,
V words.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatout.data.batches.flat_batch import FlatBatch, rows_of_one_length
from flatout.data.batches.kept_tensors import count_up
from flatout.errors import require
from flatout.models.casts import Joined, cast_in_pass, dtype_of_pass
from flatout.models.contract import Lengths, Product
from flatout.models.encoder.attention import Kernel
from flatout.models.encoder.embeddings import (
    embed_tokens,
    number_positions,
    number_texts,
    rotary_positions,
)
from flatout.models.encoder.facts import read_facts
from flatout.models.encoder.families import FLAT_FAMILIES, classify_tokens
from flatout.models.encoder.flat_rows import FlatRows
from flatout.models.encoder.freezing import FreezableEncoder, require_same_weights
from flatout.models.encoder.layers import FlatLayer, Pass, groups_to_cast, replace_layers
from flatout.models.encoder.products import encoder_products
from flatout.models.encoder.relative import DistanceRows, reads_distances
from flatout.models.encoder.tied_weights import keep_tied_once
from flatout.models.encoder.windows import Windows, cut_windows, join_answers, window_lengths
from flatout.models.lean import make_lean
from flatout.run_log import Choice

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_LARGEST_FLASH_HEAD = 256  # numbers of a head; torch's flash kernel takes no larger ones
# In sixteen bits on a CPU the number of tokens of a batch is rounded up to steps of 1/64 to 1/32 of
# it (2 ** -_STEP_BITS of the next power of two), and of 16 tokens at least.
_STEP_BITS = 6
_LEAST_STEP = 16  # tokens
_NO_LIMIT = 2**31 - 1  # tokens of a row, in families without a table of positions
Compute = StrEnum("Compute", "auto flat padded")


class Transformer(FreezableEncoder):
    """An encoder and its head; tags and masked words are answered token by token."""

    def __init__(
        self,
        net: PreTrainedModel,
        is_tagging: bool,
        compute: Compute,
        separator_id: int | None,
        *,
        predicts_words: bool = False,
    ) -> None:
        """Wrap `net`, a model of transformers with its head.

        `separator_id`: the token between the two texts of a pair; None: rows are single texts.
        """
        super().__init__()
        self.net = net
        self.is_tagging = is_tagging
        self.separator_id = separator_id
        # whether it answers with words, at the batch's `places` or at all tokens
        self.predicts_words = predicts_words
        # fraction of tokens that a head for words reads, for counts of operations
        self.read_share = 1.0
        self.described: PretrainedConfig = net.config
        self.family: str = net.config.model_type
        self.facts = read_facts(net)
        # whether flat layers compute activations again in the backward pass, to save memory
        self.recomputes = False
        self.joins = Windows.mean  # how the answers of a row's windows are joined
        self.window_query: nn.Parameter | None = None
        self._waiting: list[list[str]] = []  # layers that thaw later (`freezing.py`)
        self._kernels: dict[tuple[str, torch.dtype, bool], Kernel] = {}
        self._groups: dict[tuple[bool, int], list[list[nn.Linear]]] = {}  # for `_cast_at_once`
        self._joined: Joined = {}  # weights of the pass that is running
        self._choose_batches(compute)
        self._distance_rows = DistanceRows()
        self._numbers_pairs = separator_id is not None and self.facts.numbers_pairs
        pooling = self.facts.pooling
        # whether a row's answer is the mean of its tokens' answers
        self.means_answers = pooling == "late" and not self.answers_tokens
        # whether only first tokens are read after the last layer, so only they are computed there
        reads_first = not self.answers_tokens and pooling not in ("mean", "late")
        self.is_narrow = self.is_flat and reads_first
        if self.is_flat:
            replace_layers(net, FLAT_FAMILIES[self.family])
        else:
            _use_plain_attention(net)
        self.register_load_state_dict_post_hook(require_same_weights)
        make_lean(net)
        # by each name that the state leaves out, the name that it keeps for the same weight
        self.first_names = keep_tied_once(self)

    def _choose_batches(self, compute: Compute) -> None:
        """Let batches be flat where the family can; refuse what neither form can read."""
        can_be_flat = not self.facts.why_not_flat
        require(
            compute is not Compute.flat or can_be_flat,
            "model.compute",
            self.facts.why_not_flat,
            allowed=", ".join(FLAT_FAMILIES),
            hint="Set it to auto.",
        )
        self.is_flat = can_be_flat and compute is not Compute.padded
        self.layout = "flat" if self.is_flat else "padded"
        has_padding = self.facts.padding_id is not None
        require(
            self.is_flat or self.answers_tokens or has_padding,
            "model",
            f"{self.family} has no padding token",
            hint="Set pad_token_id in its config.json.",
        )
        self.padding_id = self.facts.padding_id or 0

    @property
    def answers_tokens(self) -> bool:
        """Whether there is an answer for each token rather than for each row."""
        return self.is_tagging or self.predicts_words

    @property
    def why_padded(self) -> str:
        """Why batches are padded; empty where they are not."""
        return "" if self.is_flat else self.facts.why_not_flat or "asked for"

    @property
    def attention_dropout(self) -> float:
        """Fraction of attention that the encoder's own settings drop in training."""
        return self.facts.attention_dropout

    def decides_on_host(self) -> str:
        """What a step decides on the host, in words; empty where a captured step can replay it."""
        if self.window and (self.predicts_words or not self.is_flat):
            return "where long texts are cut into windows"
        if self.answers_tokens and not self.is_flat:
            return "which tokens are answered"
        return "which activations are computed again" if self.recomputes else ""

    def longest_row(self) -> int:
        """The most tokens that a row may have."""
        longest = self.facts.longest
        return _NO_LIMIT if longest is None else longest - self.facts.first_position

    def num_ids(self) -> int:
        """How many token ids the encoder knows."""
        return int(self.net.get_input_embeddings().weight.shape[0])

    def forward(self, batch: FlatBatch) -> Tensor:
        """`[B, C]`, or `[T, C]` for tags.

        For words `[K, V]` at the batch's places, or `[T, V]` where it names none.
        """
        read = self._flat if self.is_flat else self._padded
        if not self.window:
            return read(batch)
        if batch.texts is not None:  # its rows are windows already, in the order of the texts
            answers = read(batch)
            if self.is_tagging:
                return answers
            # Rows that only fill the buffer belong to one text more, behind the real ones.
            return join_answers(answers, batch.texts, batch.num_real + 1, self.joins)
        windows, texts_W, cut_order_T = cut_windows(batch, self.window)
        answers = read(windows)
        if self.is_tagging:  # back in the order of the row
            return torch.empty_like(answers).index_copy(0, cut_order_T, answers)
        return join_answers(answers, texts_W, batch.num_rows, self.joins)

    def set_windows(self, window: int, joins: Windows) -> None:
        """Read rows as windows of `window` tokens, and join the windows' answers like `joins`.

        0 tokens: rows are read at once.
        """
        self.window = window
        self.joins = joins
        if not window or joins is not Windows.attention or self.answers_tokens:
            return
        linear = [module for module in self.head_modules() if isinstance(module, nn.Linear)]
        is_linear = bool(linear) and linear[-1].out_features == self.described.num_labels
        require(
            is_linear,
            "model.windows",
            f"attention, but the head of {self.family} does not end in a linear layer",
            hint="Set model.windows=mean.",
        )
        if self.window_query is None:
            # a query of zeros scores all windows alike: training begins with the plain mean
            self.window_query = nn.Parameter(torch.zeros(linear[-1].in_features))
            linear[-1].register_forward_hook(self._append_scores)

    def _append_scores(self, _: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        """Append each window's score to its logits: the query times the vector they are made of."""
        if not self.window:
            return logits
        assert self.window_query is not None
        scores = nn.functional.linear(inputs[0], self.window_query.unsqueeze(0))
        return torch.cat([logits, scores], -1)

    def drop_before_output(self, share: float) -> None:
        """Set the dropout of the head; the family's configuration may have no such setting."""
        dropouts = [module for module in self.head_modules() if isinstance(module, nn.Dropout)]
        require(
            bool(dropouts) or not share,
            "model.head_dropout",
            f"{self.family} drops nothing before its output",
            hint="Leave it out.",
        )
        for dropout in dropouts:
            dropout.p = share

    def products(self, lengths: Lengths) -> list[Product]:
        """The products of a forward pass; empty for families that are not counted."""
        if self.window:
            lengths, _ = window_lengths(lengths, self.window)
        return encoder_products(self, lengths)

    def computed_tokens(self, batch: FlatBatch) -> int:
        if self.facts.family.reads_padding:
            return batch.num_tokens
        if self.is_flat or not self.window:
            return super().computed_tokens(batch)
        lengths, _ = window_lengths(batch.lengths.numpy(), self.window)
        return int(lengths.max()) * len(lengths)

    def flat_layers(self) -> list[FlatLayer]:
        """Our layers, in the place of the library's; none where batches are padded."""
        return [module for module in self.modules() if isinstance(module, FlatLayer)]

    def kernel_choice(
        self, device: torch.device, dtype: torch.dtype, *, is_training: bool = True
    ) -> Choice[Kernel]:
        """The attention kernel on a device with products in `dtype`, with the reason for it."""
        return choose_kernel(
            device,
            dtype,
            self.described.hidden_size // self.described.num_attention_heads,
            has_windows=self.facts.family.has_windows,
            has_distances=reads_distances(self.net.base_model),
            drops_scores=is_training and self.attention_dropout > 0,
        )

    def _kernel(self, device: torch.device) -> Kernel:
        """The kernel in the number format of the moment; chosen once for each format."""
        dtype = torch.float32
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        key = (device.type, dtype, self.training)
        if key not in self._kernels:
            self._kernels[key] = self.kernel_choice(device, dtype, is_training=self.training).value
        return self._kernels[key]

    def _cast_at_once(self, batch: FlatBatch) -> AbstractContextManager[Joined]:
        """Context manager for a pass over flat batches: where it can, one operator casts all
        weights.
        """
        dtype = dtype_of_pass(self, batch.tokens.device)
        if dtype is None or self.recomputes or self.facts.family.repeats_layers:
            return nullcontext({})
        layers = cast("list[FlatLayer]", self.in_order())
        are_compiled = any(layer.compiled is not None for layer in layers)
        first = self.stored_layers if batch.states is not None else 0
        key = (are_compiled, first)
        if key not in self._groups:
            self._groups[key] = groups_to_cast(
                self.net, layers, first=first, are_first=self.is_narrow, are_compiled=are_compiled
            )
        return cast_in_pass(dtype, self._groups[key])

    def _flat(self, batch: FlatBatch) -> Tensor:
        """The answers of a family that runs flat."""
        with self._cast_at_once(batch) as self._joined:
            return self._answer_flat(batch)

    def _answer_flat(self, batch: FlatBatch) -> Tensor:
        form = FLAT_FAMILIES[self.family]
        rounded = self._in_steps(batch)
        first_layer = self.stored_layers if batch.states is not None else 0
        states_TH = self.run_layers(rounded, first=first_layer)
        reads_places = self.predicts_words and batch.places is not None
        if rounded is not batch and not reads_places:
            # leave out what was put behind the batch's own rows
            states_TH = states_TH[: batch.num_rows if self.is_narrow else batch.num_tokens]
        if form.last_norm:
            states_TH = self.net.base_model.get_submodule(form.last_norm)(states_TH)
        if self.is_tagging:
            return classify_tokens(self.net, states_TH)
        if self.predicts_words:
            return form.predict(self.net, states_TH)
        if self.is_narrow:
            return form.pool(self.net, states_TH)
        lengths_B = batch.offsets[1:] - batch.offsets[:-1]
        if self.means_answers:
            return means_of_rows(form.pool(self.net, states_TH), lengths_B)
        return form.pool(self.net, means_of_rows(states_TH, lengths_B))

    def _in_steps(self, batch: FlatBatch) -> FlatBatch:
        """Add rows that nothing reads, so that few different numbers of tokens occur.

        Only in sixteen bits on a CPU; elsewhere the batch is not changed.
        """
        # oneDNN makes and keeps a kernel for each product at each number of tokens: 1.5 MB and some
        # time a piece. A batch grows by one token in eighty on average.
        if (
            batch.states is not None
            or batch.tokens.device.type != "cpu"
            or not torch.is_autocast_enabled("cpu")
        ):
            return batch
        step = max(_LEAST_STEP, (1 << batch.num_tokens.bit_length()) >> _STEP_BITS)
        missing = -batch.num_tokens % step
        if not missing:
            return batch
        # The new rows are as long as the batch's longest row, as tables of positions may end there;
        # only the last may be shorter. 7 tokens missing, longest row 3: rows of 3, 3 and 1.
        longest = int(batch.lengths.numpy().max())
        ends = torch.arange(longest, missing + longest, longest).clamp_max_(missing)
        tokens = torch.cat((batch.tokens, batch.tokens[:1].expand(missing)))
        offsets = torch.cat((batch.offsets, batch.num_tokens + ends))
        return replace(batch, tokens=tokens, offsets=offsets, lengths=offsets.diff())

    def run_layers(
        self,
        batch: FlatBatch,
        *,
        first: int = 0,
        stop: int | None = None,
        outputs: list[Tensor] | None = None,
    ) -> Tensor:
        """`[T, H]` states after the layers `first` to `stop` (not included; None: after the last).

        After the last layer `[B, H]` where only first tokens are read. A batch that brings `states`
        brings those before layer `first`; they are read where layers were left out, or where none
        runs. Else its tokens are embedded. The states before, between and after these layers are
        appended to `outputs`; nothing is, where the batch's own states are the answer.
        """
        layers = self.in_order()
        stop = len(layers) if stop is None else stop
        if first == stop and batch.states is not None:
            return batch.states.float()
        starts_B = batch.offsets[:-1]
        lengths_B = batch.offsets[1:] - starts_B
        begins_T = torch.repeat_interleave(starts_B, lengths_B, output_size=batch.num_tokens)
        positions_T = count_up(batch.num_tokens, batch.tokens.device) - begins_T
        if first and batch.states is not None:
            states_TH = batch.states.float()
        else:
            states_TH = self._embed(batch.tokens, begins_T, positions_T)
        if outputs is not None:
            outputs.append(states_TH)
        if first == stop:
            return states_TH
        shared = self._shared_by_layers(batch, states_TH, positions_T)
        is_saving = self.recomputes and self.training
        for number, layer in enumerate(layers[first:stop], first + 1):
            arguments = (states_TH, shared, number == len(layers))
            if is_saving:
                states_TH = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                states_TH = layer(*arguments)
            if outputs is not None:
                outputs.append(states_TH)
        return states_TH

    def _embed(self, tokens_T: Tensor, begins_T: Tensor, positions_T: Tensor) -> Tensor:
        """`[T, H]` states before the first layer."""
        texts_T = None
        if self._numbers_pairs:
            texts_T = number_texts(tokens_T, begins_T, self.separator_id or 0)
        numbers_T = number_positions(tokens_T, begins_T, positions_T, self.facts.first_position)
        form = FLAT_FAMILIES[self.family]
        return embed_tokens(self.net.base_model, form, tokens_T, numbers_T, texts_T)

    def _shared_by_layers(self, batch: FlatBatch, states_TH: Tensor, positions_T: Tensor) -> Pass:
        """What all layers of this forward pass read besides the states."""
        backbone = self.net.base_model
        rows = FlatRows(batch.lengths, batch.offsets, self._kernel(states_TH.device))
        read_at_last = None
        if self.is_narrow:
            read_at_last = batch.offsets[:-1]
        elif self.predicts_words:
            read_at_last = batch.places
        rotary = rotary_positions(backbone, self.facts.rotary_kinds, states_TH, positions_T)
        shared = Pass(rows, rotary, read_at_last, self.is_narrow, joined=self._joined)
        if reads_distances(backbone):
            longest = max(rectangle.length for rectangle in rows.layout.rectangles)
            shared.distances = self._distance_rows.measure(backbone.encoder, longest)
        return shared

    def _padded(self, batch: FlatBatch) -> Tensor:
        """The answers of any family, through the library's own layers."""
        if self.facts.family.reads_padding:
            groups = rows_of_one_length(replace(batch, places=None))
            if len(groups) > 1:
                return self._answer_groups(groups, batch.places)
        tokens_BL, lengths_B = batch.padded(fill=self.padding_id)
        inputs = {"input_ids": tokens_BL.long()}
        # lengths are sorted and on the host: looking at them does not wait for the device
        if batch.lengths[0] != batch.lengths[-1]:
            inputs["attention_mask"] = self._mask(tokens_BL, lengths_B)
        if self._numbers_pairs:
            is_separator_BL = torch.eq(tokens_BL, self.separator_id or 0).long()
            texts_BL = (is_separator_BL.cumsum(1) - is_separator_BL).clamp_max_(1)
            inputs["token_type_ids"] = texts_BL
        precision: AbstractContextManager[object] = nullcontext()
        if self.facts.family.needs_fp32:
            precision = torch.autocast(tokens_BL.device.type, enabled=False)
        with precision:
            logits: Tensor = self.net(**inputs).logits
        return self._without_padding(logits, batch, lengths_B) if self.answers_tokens else logits

    def _answer_groups(self, groups: list[FlatBatch], places: Tensor | None) -> Tensor:
        """The answers of a batch in groups of rows of one length, as padding would change them."""
        answers = torch.cat([self._padded(group) for group in groups])
        if not self.predicts_words or places is None:
            return answers
        return answers.index_select(0, places)

    def _mask(self, tokens_BL: Tensor, lengths_B: Tensor) -> Tensor:
        """Which tokens are no padding, in the form that costs the library least."""
        positions_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        is_token_BL = positions_L < lengths_B.unsqueeze(1)
        # The library asks a plain mask whether it holds padding, and waits for the device. A
        # finished mask `[B, 1, 1, L]` it takes as it is, without waiting. Where it must add
        # something of its own, such as windows of attention, it needs the plain one.
        library_adds = self.facts.has_windows or self.facts.masks_itself
        takes_finished = self.described._attn_implementation == "sdpa" and not library_adds
        return is_token_BL[:, None, None] if takes_finished else is_token_BL.long()

    def _without_padding(self, logits: Tensor, batch: FlatBatch, lengths_B: Tensor) -> Tensor:
        """`[T, C]` or `[K, V]` of the padded answers `[B, L, C]`, in the order of the batch."""
        # Offsets [0, 2, 5], longest row 3: row 0 stands at 0, row 1 at 3, so its tokens move by 1.
        device = batch.offsets.device
        shift_B = torch.arange(batch.num_rows, device=device) * logits.shape[1] - batch.offsets[:-1]
        shift_T = torch.repeat_interleave(shift_B, lengths_B, output_size=batch.num_tokens)
        in_rectangle_T = torch.arange(batch.num_tokens, device=device) + shift_T
        if self.predicts_words and batch.places is not None:
            in_rectangle_T = in_rectangle_T.index_select(0, batch.places)
        return logits.flatten(0, 1).index_select(0, in_rectangle_T)


def choose_kernel(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    *,
    capability: tuple[int, int] | None = None,
    has_windows: bool = False,
    has_distances: bool = False,
    drops_scores: bool = False,
) -> Choice[Kernel]:
    """The attention kernel for a device, with products in `dtype`, and the reason for it.

    `capability` is the compute capability of the GPU; None: it is asked for. `has_windows`: some
    tokens of a row do not see each other. `has_distances`: scores depend on how far apart two
    tokens are. `drops_scores`: attention has dropout.
    """
    if device.type == "cpu":
        evidence = "0.4 to 0.9 times as long as torch's fused attention, as measured"
        return Choice(Kernel.rectangles, "the fastest on a CPU", evidence)
    if device.type != "cuda":
        reason = f"no kernel of unequal rows for {device.type}"
        return Choice(Kernel.padded, reason, "scores are padded, with a mask")
    major, minor = capability or torch.cuda.get_device_capability(device)
    number_format = str(dtype).removeprefix("torch.")
    evidence = f"compute capability {major}.{minor}, {number_format}, head size {head_size}"
    is_flash = (major, minor) >= (8, 0) and dtype in (torch.bfloat16, torch.float16)
    if is_flash and head_size <= _LARGEST_FLASH_HEAD and not has_distances:
        return Choice(Kernel.varlen, "the fused kernel for rows of unequal length", evidence)
    reasons_to_pad = {
        "no fused kernel adds to scores what distances say": has_distances,
        "windows of attention need a mask in this number format": has_windows,
        "the memory-efficient kernel's gradients are wrong with dropout": drops_scores,
        "no fused kernel in bf16 on this GPU": dtype is torch.bfloat16 and major < 8,
    }
    for reason, holds in reasons_to_pad.items():
        if holds:
            return Choice(Kernel.padded, reason, evidence)
    reason = "the flash kernel needs 16 bits and compute capability 8.0"
    if is_flash:
        reason = f"the flash kernel takes heads up to {_LARGEST_FLASH_HEAD}"
    return Choice(Kernel.efficient, reason, evidence)


def means_of_rows(states_TH: Tensor, lengths_B: Tensor) -> Tensor:
    """`[B, H]` means over the tokens of each row."""
    rows_B = torch.arange(len(lengths_B), device=states_TH.device)
    row_of_T = torch.repeat_interleave(rows_B, lengths_B, output_size=len(states_TH))
    zeros_BH = states_TH.new_zeros(len(lengths_B), states_TH.shape[1])
    sums_BH = zeros_BH.index_add(0, row_of_T, states_TH)
    return sums_BH / lengths_B.unsqueeze(1).to(states_TH.dtype)


def _use_plain_attention(net: PreTrainedModel) -> None:
    """Choose the library's attention by PyTorch, else its attention in plain products."""
    # Where a family has only one, setting it would warn.
    can_choose = getattr(net, "_can_set_attn_implementation", None)
    if can_choose is not None and not can_choose():
        return
    for name in ("sdpa", "eager"):
        with suppress(ValueError, ImportError):
            net.set_attn_implementation(name)
            return
