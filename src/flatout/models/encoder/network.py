"""An encoder of transformers and its head, over flat batches where its family allows it, else over
padded ones.

The model is the library's own class with its own modules, so weights load from it and save to it.
Where a family runs flat, its layers are replaced by ours (`layers.py`), and this file does what
comes before and after them over `[T, H]` tokens: positions begin again with each row, and a head
that reads first tokens gets these. Families that cannot run so get padded rows of like length
through the library's own layers. A row may hold the windows of a text one after the other. They are
the rows of a batch then, shortest first, each with positions of its own. The text's answer is the
mean of their logits, or the largest of each class, or what the last layer of the head answers to
the mean of their vectors, weighted by a learned attention. So its loss counts once however long it
is. Tags are answered token by token, in the order of the row.

Shapes: T tokens, B rows, W windows, L longest row, H numbers a token, C outputs.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatout.data.batches.flat_batch import FlatBatch, rows_of_one_length
from flatout.errors import require
from flatout.models.contract import Lengths, Product
from flatout.models.encoder.attention import Kernel
from flatout.models.encoder.families import FLAT_FAMILIES, classify_tokens, why_not_flat
from flatout.models.encoder.freezing import FreezableEncoder, require_same_weights
from flatout.models.encoder.layers import FlatLayer, Pass, replace_layers
from flatout.models.encoder.products import encoder_products
from flatout.models.encoder.rectangles import FlatRows
from flatout.models.encoder.relative import measure_distances, reads_distances
from flatout.models.encoder.tied_weights import keep_tied_once
from flatout.models.encoder.windows import Windows, answer_texts, cut_windows, window_lengths
from flatout.models.lean import make_lean
from flatout.run_log import Choice

_NUMBERED_PAIRS = {"albert", "bert", "electra", "deberta-v2", "deberta"}
"""Families that tell the texts of a pair apart by numbers beside the tokens; others do where they
have a table."""
# fail under autocast: they hide padding by a number that sixteen bits cannot hold
_FP32_ALONE = {"deberta"}
_READ_PADDING = {"xlnet", "fnet", "convbert", "nystromformer", "yoso"}
"""Families that answer a row otherwise where padding stands beside it: they get rows of one length
at a time."""
_ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")
_LARGEST_FLASH_HEAD = 256
# tokens of a batch come in steps of 1/64 to 1/32 of their number, and of 16 at least
_LEAST_STEP = 16
_STEP_BITS = 6
Compute = StrEnum("Compute", "auto flat padded")


class Transformer(FreezableEncoder):
    """An encoder and its head; tags and masked words are answered token by token."""

    def __init__(
        self,
        net: Any,
        is_tagging: bool,
        compute: Compute,
        separator_id: int | None,
        *,
        predicts_words: bool = False,
    ) -> None:
        super().__init__()
        self.net = net
        self.is_tagging = is_tagging
        self.separator_id = separator_id
        # whether it answers with words, at the batch's `places` or at all tokens
        self.predicts_words = predicts_words
        self.read_share = 1.0  # fraction of tokens that such a head reads, for counts of operations
        self.described: Any = net.config
        self.family: str = net.config.model_type
        # whether flat layers compute activations again in the backward pass, to save memory
        self.recomputes = False
        self.window = 0  # tokens of the windows that a row holds; 0: it is read at once
        self.joins = Windows.mean  # what of their answers is the row's
        self.window_query: nn.Parameter | None = None
        self._waiting: list[list[str]] = []
        self._kernels: dict[tuple[str, torch.dtype, bool], Kernel] = {}
        why = why_not_flat(net.config)
        allowed = ", ".join(FLAT_FAMILIES)
        require(
            compute is not Compute.flat or not why,
            "model.compute",
            why,
            allowed=allowed,
            hint="Set it to auto.",
        )
        self.is_flat = not why and compute is not Compute.padded
        self.layout = "flat" if self.is_flat else "padded"
        self._masks_itself = self.family not in FLAT_FAMILIES or self.family == "eurobert"
        self._masks_itself |= getattr(net.config, "is_decoder", False)
        """Whether it adds to a mask, as decoders do, or counts by it: a finished one would take the
        place of all."""
        is_padded = self.is_flat or self.answers_tokens or net.config.pad_token_id is not None
        require(
            is_padded,
            "model",
            f"{self.family} has no padding token",
            hint="Set pad_token_id in its config.json.",
        )
        self.padding_id: int = net.config.pad_token_id or 0
        places = getattr(getattr(net.base_model, "embeddings", None), "position_embeddings", None)
        # where a table has one, rows begin after it
        padding_place = getattr(places, "padding_idx", None)
        self.first_position = 0 if padding_place is None else padding_place + 1
        is_typed = bool(why) and (getattr(net.config, "type_vocab_size", 0) or 0) > 1
        self._numbers_pairs = separator_id is not None and (
            self.family in _NUMBERED_PAIRS or is_typed
        )
        pooling = getattr(net.config, "classifier_pooling", "")
        # rows have the means of tokens' answers
        self.means_answers = pooling == "late" and not self.answers_tokens
        self.is_narrow = (
            self.is_flat and not self.answers_tokens and pooling not in ("mean", "late")
        )
        """Whether only first tokens are read after the last layer, so that only they are computed
        there."""
        if self.is_flat:
            replace_layers(net, FLAT_FAMILIES[self.family])
        else:
            _use_plain_attention(net)
        self.register_load_state_dict_post_hook(require_same_weights)
        make_lean(net)
        keep_tied_once(self)

    @property
    def answers_tokens(self) -> bool:
        """Whether there is an answer for each token rather than for each row."""
        return self.is_tagging or self.predicts_words

    @property
    def why_padded(self) -> str:
        """Why batches are padded; empty where they are not."""
        return "" if self.is_flat else why_not_flat(self.described) or "asked for"

    @property
    def attention_dropout(self) -> float:
        """Fraction of attention that the encoder's own settings drop."""
        return max(
            (getattr(self.described, name, None) or 0.0 for name in _ATTENTION_DROPOUTS),
            default=0.0,
        )

    def longest_row(self) -> int:
        """Most tokens a row may have."""
        most = getattr(self.described, "max_position_embeddings", None)
        return int(most) - self.first_position if most and most > 0 else 2**31 - 1

    def forward(self, batch: FlatBatch) -> Tensor:
        """`[B, C]`; `[T, C]` for tags; `[K, V]` for words at the batch's places, `[T, V]` where it
        has none.
        """
        read = self._flat if self.is_flat else self._padded
        if not self.window:
            return read(batch)
        windows, text_W, places_T = cut_windows(batch, self.window)
        if self.is_tagging:
            answers_TC = read(windows)
            return torch.empty_like(answers_TC).index_copy(0, places_T, answers_TC)
        return answer_texts(read(windows), text_W, batch.num_rows, self.joins)

    def read_windows(self, window: int, joins: Windows) -> None:
        """Read rows as windows of so many tokens, 0: at once; the answer of a text is this of its
        windows' answers.
        """
        self.window, self.joins = window, joins
        if not window or joins is not Windows.attention or self.answers_tokens:
            return
        layers = [each for each in self.head_modules() if isinstance(each, nn.Linear)]
        is_linear = bool(layers) and layers[-1].out_features == self.described.num_labels
        require(
            is_linear,
            "model.windows",
            f"attention, but the head of {self.family} does not end in a linear layer",
            hint="Set model.windows=mean.",
        )
        if self.window_query is None:
            # at first the plain mean
            self.window_query = nn.Parameter(torch.zeros(layers[-1].in_features))
            layers[-1].register_forward_hook(self._add_scores)

    def _add_scores(self, _: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        """The query's product with the vector that logits are made of, beside them, while there are
        windows.
        """
        if not self.window:
            return logits
        assert self.window_query is not None
        return torch.cat(
            [logits, nn.functional.linear(inputs[0], self.window_query.unsqueeze(0))], -1
        )

    def drop_before_output(self, share: float) -> None:
        """Drop so much in the head, also where a family's configuration has no word for it."""
        found = [module for module in self.head_modules() if isinstance(module, nn.Dropout)]
        require(
            bool(found) or not share,
            "model.head_dropout",
            f"{self.family} drops nothing before its output",
            hint="Leave it out.",
        )
        for module in found:
            module.p = share

    def products(self, lengths: Lengths) -> list[Product]:
        """The products of a forward pass; empty for families that are not counted."""
        return encoder_products(
            self, window_lengths(lengths, self.window)[0] if self.window else lengths
        )

    def computed_tokens(self, batch: FlatBatch) -> int:
        if self.family in _READ_PADDING:
            return batch.num_tokens
        if self.is_flat or not self.window:
            return super().computed_tokens(batch)
        lengths, _ = window_lengths(batch.lengths.numpy(), self.window)
        return int(lengths.max()) * len(lengths)

    def flat_layers(self) -> list[FlatLayer]:
        """The layers of ours; none where batches are padded."""
        return [module for module in self.modules() if isinstance(module, FlatLayer)]

    def kernel_choice(
        self, device: torch.device, dtype: torch.dtype, *, is_training: bool = True
    ) -> Choice[Kernel]:
        """What computes attention on a device in this number format, with its reason."""
        size = self.described.hidden_size // self.described.num_attention_heads
        drops = is_training and self.attention_dropout > 0
        apart = reads_distances(self.net.base_model)
        windows = self.family == "modernbert"
        return choose_kernel(
            device, dtype, size, has_windows=windows, has_distances=apart, drops_scores=drops
        )

    def _kernel(self, device: torch.device) -> Kernel:
        dtype = (
            torch.get_autocast_dtype(device.type)
            if torch.is_autocast_enabled(device.type)
            else torch.float32
        )
        key = device.type, dtype, self.training
        if key not in self._kernels:
            self._kernels[key] = self.kernel_choice(device, dtype, is_training=self.training).value
        return self._kernels[key]

    def _flat(self, batch: FlatBatch) -> Tensor:
        family = FLAT_FAMILIES[self.family]
        padded = self._in_steps(batch)
        states_TH = self.run_layers(
            padded, first=self.stored_layers if batch.states is not None else 0
        )
        if padded is not batch and (batch.places is None or not self.predicts_words):
            states_TH = states_TH[: batch.num_rows if self.is_narrow else batch.num_tokens]
        if family.last_norm:
            states_TH = self.net.base_model.get_submodule(family.last_norm)(states_TH)
        if self.is_tagging:
            return classify_tokens(self.net, states_TH)
        if self.predicts_words:
            return family.predict(self.net, states_TH)
        if self.is_narrow:
            return family.pool(self.net, states_TH)
        lengths_B = batch.offsets[1:] - batch.offsets[:-1]
        if self.means_answers:
            return means_of_rows(family.pool(self.net, states_TH), lengths_B)
        return family.pool(self.net, means_of_rows(states_TH, lengths_B))

    def _in_steps(self, batch: FlatBatch) -> FlatBatch:
        """In sixteen bits on a CPU, with more rows that nothing reads, so that few numbers of
        tokens occur.
        """
        # oneDNN makes and keeps a kernel for each product at each number of tokens: 1.5 MB and some
        # time a piece. A batch grows by one token in eighty on average. The last of the new rows
        # may be shorter than those before it.
        if (
            batch.states is not None
            or batch.tokens.device.type != "cpu"
            or not torch.is_autocast_enabled("cpu")
        ):
            return batch
        step = max(_LEAST_STEP, (1 << batch.num_tokens.bit_length()) >> _STEP_BITS)
        if not (more := -batch.num_tokens % step):
            return batch
        longest = int(batch.lengths.numpy().max())  # no row is longer than tables of positions know
        ends = batch.num_tokens + torch.arange(longest, more + longest, longest).clamp_max_(more)
        tokens, offsets = (
            torch.cat((batch.tokens, batch.tokens[:1].expand(more))),
            torch.cat((batch.offsets, ends)),
        )
        return replace(batch, tokens=tokens, offsets=offsets, lengths=offsets.diff())

    def run_layers(
        self,
        batch: FlatBatch,
        *,
        first: int = 0,
        stop: int | None = None,
        outputs: list[Tensor] | None = None,
    ) -> Tensor:
        """`[T, H]` after the layers `first` to `stop`; `[B, H]` where first tokens alone are read
        after the last.
        """
        # From the layer `first` on the batch's own states are read; before it, its tokens.
        # `outputs` gets the states between these layers.
        layers = self.in_order()
        stop = len(layers) if stop is None else stop
        if first == stop and batch.states is not None:
            return batch.states.float()
        starts_B = batch.offsets[:-1]
        begins_T = torch.repeat_interleave(
            starts_B, batch.offsets[1:] - starts_B, output_size=batch.num_tokens
        )
        places_T = torch.arange(batch.num_tokens, device=batch.tokens.device) - begins_T
        if first and batch.states is not None:
            states_TH = batch.states.float()
        else:
            pairs_T = self._pair_numbers(batch.tokens, begins_T) if self._numbers_pairs else None
            states_TH = self._embed(
                batch.tokens, self._numbers(batch.tokens, begins_T, places_T), pairs_T
            )
        if outputs is not None:
            outputs.append(states_TH)
        if first == stop:
            return states_TH
        rows = FlatRows(batch.lengths, batch.offsets, self._kernel(states_TH.device))
        kept = starts_B if self.is_narrow else batch.places if self.predicts_words else None
        shared = Pass(rows, self._rotary(states_TH, places_T), kept, self.is_narrow)
        if reads_distances(self.net.base_model):
            longest = max(part.length for part in rows.layout.rectangles)
            shared.distances = measure_distances(self.net.base_model.encoder, longest)
        for number, layer in enumerate(layers[first:stop], first + 1):
            arguments = (states_TH, shared, number == len(layers))
            is_saving = self.recomputes and self.training
            states_TH = (
                checkpoint(layer, *arguments, use_reentrant=False)
                if is_saving
                else layer(*arguments)
            )
            if outputs is not None:
                outputs.append(states_TH)
        return states_TH

    def _embed(self, tokens_T: Tensor, places_T: Tensor, pairs_T: Tensor | None) -> Tensor:
        backbone = self.net.base_model
        if (embed := FLAT_FAMILIES[self.family].embed) is not None:
            return embed(backbone, tokens_T)
        parts = backbone.embeddings
        states_TH: Tensor = parts.word_embeddings(tokens_T)
        if (kinds := getattr(parts, "token_type_embeddings", None)) is not None:
            states_TH = states_TH + (kinds.weight[0] if pairs_T is None else kinds(pairs_T))
        if parts.position_embeddings is not None:
            states_TH = states_TH + parts.position_embeddings(places_T)
        if getattr(parts, "embed_proj", None) is not None:
            states_TH = parts.embed_proj(states_TH)
        states_TH = parts.dropout(parts.LayerNorm(states_TH))
        of_albert = getattr(getattr(backbone, "encoder", None), "embedding_hidden_mapping_in", None)
        # of tables narrower than the layers
        widen = getattr(backbone, "embeddings_project", of_albert)
        return states_TH if widen is None else widen(states_TH)

    def _numbers(self, tokens_T: Tensor, begins_T: Tensor, places_T: Tensor) -> Tensor:
        """Numbers of places in the table of positions; where it has one of padding, they come after
        it.
        """
        if not self.first_position:
            return places_T
        padding = self.first_position - 1
        is_counted_T = tokens_T.ne(padding).long()
        counted_T = is_counted_T.cumsum(0)
        return (counted_T - counted_T[begins_T] + is_counted_T[begins_T]) * is_counted_T + padding

    def _rotary(self, states_TH: Tensor, places_T: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Rotary positions of the queries and keys of each kind of layer, `[T, 1, 1, D]`; empty for
        most families.
        """
        if (table := getattr(self.net.base_model, "rotary_emb", None)) is None:
            return {}
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for kind in dict.fromkeys(getattr(self.described, "layer_types", None) or [""]):
            cos, sin = table(
                states_TH.unsqueeze(0), places_T.unsqueeze(0), *([kind] if kind else [])
            )
            found[kind] = cos[0, :, None, None].float(), sin[0, :, None, None].float()
        return found

    def _pair_numbers(self, tokens_T: Tensor, begins_T: Tensor) -> Tensor:
        """0 up to the first separator of a row, 1 after it."""
        is_separator_T = torch.eq(tokens_T, self.separator_id or 0).long()
        before_T = is_separator_T.cumsum(0) - is_separator_T
        return (before_T - before_T[begins_T]).clamp_max_(1)

    def _padded(self, batch: FlatBatch) -> Tensor:
        if (
            self.family in _READ_PADDING
            and len(parts := rows_of_one_length(replace(batch, places=None))) > 1
        ):
            answers = torch.cat([self._padded(part) for part in parts])
            places = batch.places if self.predicts_words else None
            return answers if places is None else answers.index_select(0, places)
        tokens_BL, lengths_B = batch.padded(fill=self.padding_id)
        longest = tokens_BL.shape[1]
        given: dict[str, Any] = {}
        if batch.lengths[0] != batch.lengths[-1]:  # sorted and on the host: no wait for the device
            is_token_BL = torch.arange(longest, device=tokens_BL.device) < lengths_B.unsqueeze(1)
            # The library asks a plain mask whether it holds padding, and waits; fused attention
            # takes a finished one, in the place of windows, too.
            has_windows = "sliding_attention" in (
                getattr(self.described, "layer_types", None) or ()
            )
            is_fused = self.described._attn_implementation == "sdpa" and not (
                has_windows or self._masks_itself
            )
            given["attention_mask"] = is_token_BL[:, None, None] if is_fused else is_token_BL.long()
        if self._numbers_pairs:
            is_separator_BL = torch.eq(tokens_BL, self.separator_id or 0).long()
            given["token_type_ids"] = (is_separator_BL.cumsum(1) - is_separator_BL).clamp_max_(1)
        with (
            nullcontext()
            if self.family not in _FP32_ALONE
            else torch.autocast(tokens_BL.device.type, enabled=False)
        ):
            logits = self.net(input_ids=tokens_BL.long(), **given).logits
        if not self.answers_tokens:
            return logits
        device = batch.offsets.device
        shift_B = torch.arange(batch.num_rows, device=device) * longest - batch.offsets[:-1]
        shift_T = torch.repeat_interleave(shift_B, lengths_B, output_size=batch.num_tokens)
        places_T = torch.arange(batch.num_tokens, device=device) + shift_T
        if self.predicts_words and batch.places is not None:
            places_T = places_T.index_select(0, batch.places)
        return logits.flatten(0, 1).index_select(0, places_T)


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
    """The kernel for a device and the number format of products; `capability`: the GPU's, read
    where it is left out.
    """
    if device.type == "cpu":
        return Choice(
            Kernel.rectangles, "a CPU", "0.4 to 0.9 of the time of fused groups of rows, measured"
        )
    if device.type != "cuda":
        return Choice(
            Kernel.padded,
            f"no kernel of unequal rows for {device.type}",
            "scores are padded, with a mask",
        )
    major, minor = capability or torch.cuda.get_device_capability(device)
    evidence = (
        f"compute capability {major}.{minor}, {str(dtype).removeprefix('torch.')}, head size"
        f" {head_size}"
    )
    is_flash = (major, minor) >= (8, 0) and dtype in (torch.bfloat16, torch.float16)
    if is_flash and head_size <= _LARGEST_FLASH_HEAD and not has_distances:
        return Choice(Kernel.varlen, "the fused kernel for rows of unequal length", evidence)
    refusals = {
        "no fused kernel adds to scores what distances say": has_distances,
        "windows of attention need a mask in this number format": has_windows,
        "the memory-efficient kernel's gradients are wrong with dropout": drops_scores,
        "no fused kernel in bf16 on this GPU": dtype is torch.bfloat16 and major < 8,
    }
    if refused := [why for why, holds in refusals.items() if holds]:
        return Choice(Kernel.padded, refused[0], evidence)
    largest = f"the flash kernel takes heads up to {_LARGEST_FLASH_HEAD}"
    return Choice(
        Kernel.efficient,
        largest if is_flash else "the flash kernel needs 16 bits and 8.0",
        evidence,
    )


def means_of_rows(states_TH: Tensor, lengths_B: Tensor) -> Tensor:
    """`[B, H]` means over the tokens of each row."""
    rows_B = torch.arange(len(lengths_B), device=states_TH.device)
    row_of_T = torch.repeat_interleave(rows_B, lengths_B, output_size=len(states_TH))
    zero = states_TH.new_zeros(len(lengths_B), states_TH.shape[1])
    return zero.index_add(0, row_of_T, states_TH) / lengths_B.unsqueeze(1).to(states_TH.dtype)


def _use_plain_attention(net: Any) -> None:
    # it has one, and would warn of that
    if not getattr(net, "_can_set_attn_implementation", lambda: True)():
        return
    for name in ("sdpa", "eager"):
        with suppress(ValueError, ImportError):
            net.set_attn_implementation(name)
            return
