"""The attention operation: which kernel it takes where, and that each is called so that it computes
the same.

CUDA's kernels run on no CPU. So their operators are replaced by dense ones that read the same
arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flatout.data.batches.flat_batch import flat_batch
from flatout.models.encoder.attention import Kernel, Scores, pad_heads
from flatout.models.encoder.flat_rows import FlatRows
from flatout.models.encoder.network import choose_kernel
from flatout.models.encoder.rectangles import lay_out_rows
from flatout.models.encoder.transformer import Outputs, TransformerConfig
from flatout.models.lean import kept_places
from flatout.run_log import Choice

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
FP32 = torch.float32
FP16 = torch.float16
BF16 = torch.bfloat16
LENGTHS = [1, 3, 9, 9, 30, 170]


def chosen(
    dtype: torch.dtype, capability: tuple[int, int], head_size: int = 64, **named: bool
) -> Choice[Kernel]:
    return choose_kernel(CUDA, dtype, head_size, capability=capability, **named)


@pytest.mark.parametrize(
    ("dtype", "capability", "head_size", "windows", "kernel"),
    [
        (BF16, (9, 0), 64, True, "varlen"),
        (FP16, (8, 0), 20, False, "varlen"),  # padded to 24
        (BF16, (8, 6), 320, False, "efficient"),
        (FP32, (9, 0), 64, False, "efficient"),
        (FP32, (9, 0), 64, True, "padded"),
        (FP16, (7, 5), 64, False, "efficient"),
        (BF16, (7, 0), 64, False, "padded"),
    ],
)
def test_the_kernel_follows_device_number_format_and_head_size(
    dtype, capability, head_size, windows, kernel
):
    choice = chosen(dtype, capability, head_size, has_windows=windows)
    assert choice.value == kernel
    assert f"compute capability {capability[0]}.{capability[1]}" in choice.evidence
    assert choice.why


def test_a_cpu_takes_rectangles_and_an_unknown_device_padded_rows():
    assert choose_kernel(CPU, BF16, 64).value is Kernel.rectangles
    assert choose_kernel(torch.device("mps"), FP32, 64).value is Kernel.padded


@pytest.mark.parametrize("size", [1, 12, 20, 31, 64])
def test_heads_of_any_size_are_padded_without_a_change_of_the_answer(size):
    query, key, value = (torch.randn(2, 3, 5, size, requires_grad=True) for _ in range(3))
    plain = functional.scaled_dot_product_attention(query, key, value)
    padded = pad_heads(8, query, key, value)
    assert {part.shape[-1] % 8 for part in padded} == {0}
    found = functional.scaled_dot_product_attention(*padded, scale=size**-0.5)[..., :size]
    torch.testing.assert_close(found, plain)
    for ours, theirs in zip(
        *(torch.autograd.grad(each.sum(), query) for each in (found, plain)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_the_longest_row_is_found_wherever_it_stands():
    lengths = torch.tensor([200, 3])
    rows = FlatRows(lengths, torch.tensor([0, 200, 203]), Kernel.varlen)
    assert rows.bounds.longest == 256  # rounded up, so that shapes repeat
    assert type(rows.bounds.longest) is int


def test_rows_out_of_order_are_kept_apart_on_a_cpu():
    torch.manual_seed(0)
    qkv = torch.randn(203, 3, 2, 8)
    scores = Scores(8**-0.5, 0.0, None)
    rows = FlatRows(torch.tensor([200, 3]), torch.tensor([0, 200, 203]), Kernel.rectangles)
    found = rows.attend(qkv, scores)
    for begin, end in ((0, 200), (200, 203)):
        query, key, value = qkv[begin:end].permute(1, 2, 0, 3)
        alone = functional.scaled_dot_product_attention(query, key, value).transpose(0, 1)
        torch.testing.assert_close(found[begin:end], alone, rtol=1e-5, atol=1e-5)


def dropped_row_by_row(
    query: Tensor, key: Tensor, value: Tensor, share: float, seed: int, is_first: bool
) -> Tensor:
    """Attention of rows of LENGTHS one by one, by autograd, with the places that rectangles drop
    for this seed.
    """
    heads = key.shape[1]
    parts = lay_out_rows(np.array(LENGTHS)).rectangles
    sizes = []
    for part in parts:
        queries = 1 if is_first else part.length
        sizes.append(part.rows * heads * part.length * queries)
    torch.manual_seed(seed)
    stays, scale = kept_places(torch.Size([sum(sizes)]), share)
    ends = np.cumsum(LENGTHS)
    found = []
    for part, own in zip(parts, (stays.ne(0) * scale).split(sizes), strict=True):
        for factor, row in zip(
            own.view(part.rows, heads, -1, part.length), range(part.first_row, 99), strict=False
        ):
            length = LENGTHS[row]
            tokens = slice(ends[row] - LENGTHS[row], ends[row])
            asked = query[row : row + 1] if is_first else query[tokens]
            asks, reads, values = (
                each.transpose(0, 1) for each in (asked, key[tokens], value[tokens])
            )
            shares = (asks @ reads.transpose(1, 2) * asks.shape[2] ** -0.5).softmax(-1)
            found.append(((shares * factor[:, :length, :length]) @ values).transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("is_first", [False, True])
def test_dropout_of_rectangles_and_its_gradients_are_those_of_rows_one_by_one(is_first):
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    inputs = [torch.randn(len(LENGTHS) if is_first else tokens, 4, 8), torch.randn(tokens, 4, 8)]
    inputs.append(torch.randn(tokens, 4, 8))
    parts = [each.requires_grad_() for each in inputs]
    rows = FlatRows(
        torch.tensor(LENGTHS), torch.tensor([0, *np.cumsum(LENGTHS)]), Kernel.rectangles
    )
    scores = Scores(8**-0.5, 0.3, None)
    torch.manual_seed(7)
    if is_first:
        ours = rows.attend(torch.stack(parts[1:], 1), scores, parts[0])
    else:
        ours = rows.attend(torch.stack(parts, 1), scores)
    theirs = dropped_row_by_row(*parts, 0.3, 7, is_first)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    wanted = torch.randn_like(ours)
    gradients = [torch.autograd.grad(each, parts, wanted) for each in (ours, theirs)]
    for own, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-5, atol=1e-5)


def dense_by_offsets(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    keys: Tensor,
    scale: float,
    side: int | None,
) -> Tensor:
    """`[T, H, D]`: what an operator for rows of unequal length gives for these offsets."""
    found = []
    for row in range(len(keys) - 1):
        own = slice(int(queries[row]), int(queries[row + 1]))
        other = slice(int(keys[row]), int(keys[row + 1]))
        # As the fused kernel does, the last query stands beside the last key.
        asked = own.stop - own.start
        read = other.stop - other.start
        apart = torch.arange(read - asked, read)[:, None] - torch.arange(read)
        mask = None if side is None else apart.abs() <= side
        parts = (query[own], key[other], value[other])
        found.append(
            functional.scaled_dot_product_attention(
                *(each.transpose(0, 1) for each in parts), mask, scale=scale
            )
        )
    return torch.cat([each.transpose(0, 1) for each in found])


class Operators:
    """Stands in for CUDA's operators; refuses what they refuse, and notes what they were called
    with.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dropouts: list[float] = []
        self.bounds: list[tuple[int, int]] = []
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", self.flash)
        monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", self.efficient)

    def flash(
        self, query, key, value, queries, keys, most_q, most_k, dropout, is_causal, debug, **named
    ) -> Any:
        assert query.shape[-1] % 8 == 0
        assert query.shape[-1] <= 256
        assert (is_causal, debug) == (False, False)
        assert named["window_size_left"] == named["window_size_right"]
        self.note(queries, most_q, most_k, dropout)
        side = named["window_size_left"]
        return (dense_by_offsets(query, key, value, queries, keys, named["scale"], side),)

    def efficient(
        self,
        query,
        key,
        value,
        bias,
        queries,
        keys,
        most_q,
        most_k,
        dropout,
        mask_type,
        sums,
        **named,
    ):
        assert query.shape[-1] % 8 == 0
        assert bias is None
        assert mask_type == 0
        assert sums == torch.is_grad_enabled()
        assert most_q <= query.shape[1] and most_k <= key.shape[1]  # else its backward refuses them
        self.note(queries, most_q, most_k, dropout)
        parts = [each.squeeze(0) for each in (query, key, value)]
        return (dense_by_offsets(*parts, queries, keys, named["scale"], None).unsqueeze(0),)

    def note(self, queries: Tensor, most_q: int, most_k: int, dropout: float) -> None:
        assert queries.dtype is torch.int32
        assert type(most_q) is int
        assert type(most_k) is int
        self.bounds.append((most_q, most_k))
        self.dropouts.append(dropout)


@pytest.mark.parametrize(
    ("kernel", "window", "is_first"),
    [
        (kernel, None, is_first)
        for kernel in ("varlen", "efficient", "padded")
        for is_first in (False, True)
    ]
    + [("varlen", 6, False), ("padded", 6, False)],
)
@pytest.mark.parametrize("size", [8, 12])
def test_all_kernels_give_the_answers_and_gradients_of_rectangles(
    monkeypatch, kernel, window, size, is_first
):
    operators = Operators(monkeypatch)
    torch.manual_seed(0)
    lengths = torch.tensor(LENGTHS)
    offsets = functional.pad(lengths.cumsum(0), (1, 0))
    scores = Scores(size**-0.5, 0.0, window)
    found = []
    given = [torch.randn(222, 2 if is_first else 3, 2, size, requires_grad=True)]
    given += [torch.randn(6, 2, size, requires_grad=True)] if is_first else []
    for each in (Kernel.rectangles, Kernel(kernel)):
        rows = FlatRows(lengths, offsets, each)
        answer = rows.attend(given[0], scores, given[1] if is_first else None)
        weights = torch.linspace(-1, 1, answer.numel()).view(answer.shape)
        found.append([answer.detach(), *torch.autograd.grad((answer * weights).sum(), given)])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    if kernel != "padded":
        assert operators.bounds == [(1 if is_first else 192, 192)]


def test_scores_are_dropped_as_the_settings_say(monkeypatch):
    operators = Operators(monkeypatch)
    rows = FlatRows(torch.tensor([2, 3]), torch.tensor([0, 2, 5]), Kernel.varlen)
    rows.attend(torch.randn(5, 3, 2, 8), Scores(1.0, 0.25, None))
    assert operators.dropouts == [0.25]


def test_a_batch_of_fewer_tokens_than_the_bound_is_bounded_by_them_where_the_kernel_asks_for_it(
    monkeypatch,
):
    operators = Operators(monkeypatch)
    rows = FlatRows(torch.tensor([30]), torch.tensor([0, 30]), Kernel.efficient)
    rows.attend(torch.randn(30, 3, 2, 8), Scores(1.0, 0.0, None))
    rows.attend(torch.randn(30, 2, 2, 8), Scores(1.0, 0.0, None), torch.randn(1, 2, 8))
    assert operators.bounds == [(30, 30), (1, 30)]


@pytest.mark.parametrize(
    ("share", "kernels"),
    [
        (0.1, ["padded", "efficient"]),
        (0.0, ["efficient"] * 2),
    ],
)
def test_rows_whose_scores_are_dropped_are_padded_where_the_kernel_drops_others_backwards(
    share, kernels, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    config = TransformerConfig(family="bert", hidden=16, layers=1, heads=2, attention_dropout=share)
    model = config.build(
        Outputs(["a", "b"], "single"), vocabulary_size=60, padding_id=1, separator_id=None
    )
    assert [model.train(is_training)._kernel(CUDA) for is_training in (True, False)] == kernels
    # what a run reports is what it trains with
    assert model.kernel_choice(CUDA, FP16).value == kernels[0]
    assert chosen(BF16, (8, 0), drops_scores=True).value is Kernel.varlen


def test_a_first_token_that_sees_a_window_reads_its_own_end_of_the_row(monkeypatch):
    operators = Operators(monkeypatch)
    config = TransformerConfig(family="modernbert", hidden=16, layers=2, heads=2)
    model = config.build(
        Outputs(["a", "b"], "single"), vocabulary_size=60, padding_id=1, separator_id=None
    ).eval()
    last = model.flat_layers()[-1].part("attn")
    assert model.is_narrow
    assert last.sliding_window is not None
    last.sliding_window = 4
    batch = flat_batch([[5, 6, 7], list(range(8, 28))])
    expected = model(batch)
    monkeypatch.setattr(model, "_kernel", lambda device: Kernel.varlen)
    torch.testing.assert_close(model(batch), expected, rtol=1e-5, atol=1e-5)
    assert operators.bounds == [(64, 64)] * 2


@pytest.mark.parametrize("name", ["_flash_attention_forward", "_efficient_attention_forward"])
def test_the_operators_take_what_they_are_called_with(name):
    """On tensors without numbers torch checks names, types and shapes as it would on a GPU."""
    meta = torch.device("meta")
    qkv = torch.empty(5, 3, 2, 12, device=meta, dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.empty(3, dtype=torch.int32, device=meta)
    kernel = Kernel.varlen if "flash" in name else Kernel.efficient
    rows = FlatRows(torch.tensor([2, 3]), offsets, kernel)
    answer = rows.attend(qkv, Scores(1.0, 0.1 if kernel is Kernel.varlen else 0.0, None))
    assert answer.shape == (5, 2, 12)
    assert answer.requires_grad
    # torch's stand-in for its backward pass does not take its own arguments
    if kernel is Kernel.efficient:
        return
    (gradient,) = torch.autograd.grad(answer.sum(), qkv)
    assert gradient.shape == qkv.shape


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_an_encoder_trains_where_only_deterministic_kernels_are_allowed(family):
    """trainer.deterministic=true: torch refuses what adds in any order."""
    config = TransformerConfig(family=family, hidden=16, layers=2, heads=2)
    model = config.build(
        Outputs(["a", "b"], "single"), vocabulary_size=60, padding_id=1, separator_id=None
    )
    torch.use_deterministic_algorithms(True)
    try:
        model(flat_batch([[5, 6, 7], [8, 9]])).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())
