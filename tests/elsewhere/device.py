"""A device that is not the CPU, on any machine: its tensors say `elsewhere`, and are computed on
the CPU.

As on a GPU, what mixes them with tensors of the CPU fails. Within a step (`is_stepping`) so does
whatever makes the host wait: reading a number, a shape that depends on numbers, a copy to the host,
a copy from memory that is not page-locked. torch has one such device a process and keeps it, so
tests use processes of their own.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, library
from torch._decomp.decompositions import gru_impl, lstm_impl
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "elsewhere"
_WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
    "unique_consecutive",
    "equal",
}
"""Operators whose answer, or the shape of it, the host needs."""
_IN_SIXTEEN_BITS = (
    "linear",
    "matmul",
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "conv1d",
    "scaled_dot_product_attention",
)
_IN_FP32 = (
    "layer_norm",
    "softmax.int",
    "log_softmax.int",
    "cross_entropy_loss",
    "nll_loss",
    "binary_cross_entropy_with_logits",
)
_CELLS = ("lstm.input", "gru.input")
"""Autocast takes fp16 for these, whatever format was asked for."""
_AUTOCAST = "AutocastPrivateUse1"
_KEPT: list[Any] = []
"""What torch knows as long as its maker lives."""


class WaitError(Exception):
    """The host would wait for the device."""


class There(Tensor):
    """A tensor of the device."""

    numbers: Tensor
    is_stepping: ClassVar[bool] = False
    pinned: ClassVar[dict[int, Tensor]] = {}
    """Page-locked memory by its address."""
    may_pin: ClassVar[bool] = True
    """Whether a step may lock pages: a feed does, a model's forward pass may not."""
    called: ClassVar[list[str]] = []
    """Operators of a step."""
    watch: ClassVar[Callable[[Any], None] | None] = None
    """Called with each operator before it runs."""

    @staticmethod
    def __new__(cls, numbers: Tensor) -> There:
        found: There = Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=torch.device(NAME, 0),
        )
        found.numbers = numbers
        return found

    def __repr__(self, **named: Any) -> str:
        return f"There({self.numbers!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __format__(self, form: str) -> str:
        return format(self.cpu(), form)

    def untyped_storage(self) -> Any:
        return self.numbers.untyped_storage()  # so that what shares memory is known by its address

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if cls.watch is not None:
            cls.watch(func)
        tensors = _tensors([args, *kwargs.values()])
        of_host = [each for each in tensors if not isinstance(each, There)]
        if name in ("copy_", "_to_copy", "_copy_from"):
            _check_copy(name, args, kwargs, of_host)
        elif here := [each for each in of_host if each.dim()]:
            raise RuntimeError(
                f"{func}: a tensor of {here[0].device} {list(here[0].shape)} among those of {NAME}"
            )
        if cls.is_stepping:
            cls.called.append(name)
            if name in _WAITS:
                raise WaitError(f"{func} makes the host wait")
        goes_here = name == "_to_copy" and torch.device(kwargs.get("device") or NAME).type == "cpu"
        target = args[0] if args else None
        found = func(
            *_each(_numbers, args), **{key: _each(_numbers, value) for key, value in kwargs.items()}
        )
        if name == "copy_" or (
            func._schema.is_mutable and name.endswith("_") and not name.startswith("_")
        ):
            return target
        if goes_here:
            return found
        known = {id(each.numbers): each for each in tensors if isinstance(each, There)}

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return known[id(value)] if id(value) in known else There(value)

        return _each(moved, found)


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """What an operator takes or gives, each part changed; torch's own walk through trees takes five
    times as long.
    """
    if isinstance(value, (list, tuple)):
        return type(value)([_each(change, part) for part in value])
    return change(value)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []


def _numbers(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.numbers if isinstance(value, There) else value


def _check_copy(name: str, args: Any, kwargs: Any, here: list[Tensor]) -> None:
    to_host = name == "_to_copy" and torch.device(kwargs.get("device") or NAME).type == "cpu"
    to_host = to_host or (name == "copy_" and not isinstance(args[0], There))
    if not There.is_stepping:
        return
    if to_host:
        raise WaitError(f"{list(args[0].shape)} is copied to the host")
    for tensor in here:
        if tensor.untyped_storage().data_ptr() not in There.pinned:
            raise WaitError(f"{list(tensor.shape)} is copied from memory that is not page-locked")


def add_device(kernels: Mapping[str, Callable[..., Any]] | None = None) -> torch.device:
    """Make the device known to torch, with autocast's rules for what models here are made of.

    `kernels`: what stands for kernels of a GPU, by operator; those left out are taken apart.
    """
    backend: Any = types.ModuleType(NAME)
    backend.is_available = lambda: True
    backend.is_initialized = backend.is_available
    backend.device_count = lambda: 1
    backend.current_device = lambda: 0
    backend._is_in_bad_fork = lambda: False
    backend.manual_seed_all = lambda seed: None
    backend.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    _setup_privateuseone_for_python_backend(NAME, backend_module=backend)
    made = library.Library("aten", "IMPL", "PrivateUse1")
    made.impl(
        "empty.memory_format",
        lambda size, **named: There(torch.empty(size, dtype=named.get("dtype"))),
    )
    made.impl(
        "empty_strided",
        lambda size, stride, **named: There(
            torch.empty_strided(size, stride, dtype=named.get("dtype"))
        ),
    )
    for name in ("arange", "arange.start", "arange.start_step"):
        made.impl(name, _arange)
    made.impl("_copy_from", _copy_list)
    others = library.Library("_", "IMPL")
    others.fallback(library.fallthrough_kernel, _AUTOCAST)
    rules = library.Library("aten", "IMPL", _AUTOCAST)
    for names, kind in ((_IN_SIXTEEN_BITS, None), (_IN_FP32, torch.float32)):
        for name in names:
            operator, _, overload = name.partition(".")
            rules.impl(
                name,
                _cast_to(kind, getattr(getattr(torch.ops.aten, operator), overload or "default")),
            )
    plain = library.Library("aten", "IMPL", "AutogradPrivateUse1")
    by_operator = {
        "lstm.input": _with_shapes(lstm_impl),
        "gru.input": _with_shapes(gru_impl),
        "_flash_attention_forward": _flash,
        "_efficient_attention_forward": _efficient,
        **(kernels or {}),
    }
    for name, kernel in by_operator.items():
        plain.impl(name, kernel)
        if name in _CELLS:
            rules.impl(name, _cast_to(torch.float16, kernel, only=torch.float16))
    _KEPT.extend([made, others, rules, plain, _add_row_attention()])
    Tensor.pin_memory = _pin
    # In it torch would not take operators apart before it asks for them here.
    torch.inference_mode.__enter__ = _enter_no_grad
    torch.inference_mode.__exit__ = _exit_no_grad
    return torch.device(NAME, 0)


def _copy_list(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """The numbers of `torch.tensor([…], device=…)`, which come past the dispatcher."""
    if There.is_stepping and source.dim():
        raise WaitError(f"{list(source.shape)} numbers of a list are copied")
    _numbers(target).copy_(_numbers(source))
    return target


def _arange(*edges: Any, dtype: torch.dtype | None = None, **named: Any) -> There:
    # It has no tensor among its arguments, so it comes past `There.__torch_dispatch__`.
    if There.watch is not None:
        There.watch(torch.ops.aten.arange.default)
    return There(torch.arange(*edges, dtype=dtype))


def _with_shapes(cell: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own way to take a cell apart, whose last states have a dimension too many in torch
    2.11.
    """

    def run(inputs: Tensor, before: Any, *rest: Any) -> Any:
        states, *after = cell(inputs, before, *rest)
        like = [before] if isinstance(before, Tensor) else before
        return states, *(end.reshape(start.shape) for end, start in zip(after, like, strict=True))

    return run


def _enter_no_grad(context: Any) -> None:
    context.before = torch.is_grad_enabled()
    torch.set_grad_enabled(context.before and not context.mode)


def _exit_no_grad(context: Any, *error: Any) -> None:
    torch.set_grad_enabled(context.before)


def _pin(tensor: Tensor, *unused: Any) -> Tensor:
    if There.is_stepping and not There.may_pin:
        raise WaitError(f"{list(tensor.shape)} is copied from the host in a forward pass")
    copy = tensor.clone()
    # kept, so that no other tensor takes its place
    There.pinned[copy.untyped_storage().data_ptr()] = copy
    return copy


def _cast_to(
    kind: torch.dtype | None, operator: Any, only: torch.dtype | None = None
) -> Callable[..., Any]:
    """An operator of autocast: numbers get another format first; None: autocast's own.

    `only`: the format of autocast that asks for no other, as cuDNN's cells compute in fp16 whatever
    was asked for.
    """
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def run(*arguments: Any, **named: Any) -> Any:
        asked = torch.get_autocast_dtype(NAME)
        if only is not None and asked is not only:
            raise AssertionError(
                f"{asked} was asked for, and autocast computes this cell in {kind}"
            )
        wanted = kind or asked

        def cast(value: Any) -> Any:
            is_number = (
                isinstance(value, Tensor)
                and value.is_floating_point()
                and value.device.type == NAME
            )
            return value.to(wanted) if is_number else value

        with torch._C._ExcludeDispatchKeyGuard(key):
            return operator(
                *_each(cast, arguments), **{key: _each(cast, value) for key, value in named.items()}
            )

    return run


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    keys: Tensor,
    most_q: int,
    most_k: int,
    dropout: float,
    is_causal: bool,
    debug: bool,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:
    """What the fused kernel gives, row by row; it drops nothing."""
    There.called.append("_flash_attention_forward")
    found = _RowAttention.apply(query, key, value, queries, keys, scale, window_size_left)
    return found, found, found, found, found


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: None,
    queries: Tensor,
    keys: Tensor,
    most_q: int,
    most_k: int,
    dropout: float,
    *rest: Any,
    scale: float,
) -> Any:
    There.called.append("_efficient_attention_forward")
    assert most_q <= query.shape[1]
    assert most_k <= key.shape[1]
    assert not dropout
    found = _RowAttention.apply(query[0], key[0], value[0], queries, keys, scale, None)[None]
    return found, found, found, found, most_q, most_k


class _RowAttention(torch.autograd.Function):
    """Attention row by row, as one operator forwards and one backwards.

    It reads the rows' offsets itself, as a kernel does: no plain number of a batch is left in what
    calls it.
    """

    @staticmethod
    def forward(context: Any, *arguments: Any) -> Any:
        context.save_for_backward(*arguments[:5])
        context.rest = arguments[5:]
        return torch.ops.elsewhere.attend_rows(*arguments)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        made = torch.ops.elsewhere.attend_rows_backward(
            gradient, *context.saved_tensors, *context.rest
        )
        return *made, None, None, None, None


def _add_row_attention() -> library.Library:
    made = library.Library("elsewhere", "DEF")
    inputs = "Tensor q, Tensor k, Tensor v, Tensor queries, Tensor keys, float scale, int? side"
    made.define(f"attend_rows({inputs}) -> Tensor")
    made.define(f"attend_rows_backward(Tensor gradient, {inputs}) -> (Tensor, Tensor, Tensor)")
    made.impl("attend_rows", _by_rows, "CPU")
    made.impl("attend_rows_backward", _by_rows_backward, "CPU")
    return made


def _by_rows(
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, *how: Any
) -> Tensor:
    found = []
    for asked, read in _rows(queries, keys):
        shares = _shares(query[asked], key[read], *how)
        found.append(torch.einsum("hqk,khd->qhd", shares.to(value.dtype), value[read]))
    return torch.cat(found)


def _by_rows_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    keys: Tensor,
    scale: float,
    side: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """By hand: torch's autograd is off within an operator."""
    gradients = tuple(torch.zeros_like(part) for part in (query, key, value))
    for asked, read in _rows(queries, keys):
        shares = _shares(query[asked], key[read], scale, side)
        given = gradient[asked].float()
        of_shares = torch.einsum("qhd,khd->hqk", given, value[read].float())
        of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True)) * scale
        gradients[0][asked] = torch.einsum("hqk,khd->qhd", of_scores, key[read].float()).to(
            query.dtype
        )
        gradients[1][read] = torch.einsum("hqk,qhd->khd", of_scores, query[asked].float()).to(
            key.dtype
        )
        gradients[2][read] = torch.einsum("hqk,qhd->khd", shares, given).to(value.dtype)
    return gradients


def _rows(queries: Tensor, keys: Tensor) -> list[tuple[slice, slice]]:
    """The queries and the keys of each row, from where rows begin."""
    edges = [itertools.pairwise(each.tolist()) for each in (queries, keys)]
    return [(slice(*asked), slice(*read)) for asked, read in zip(*edges, strict=True)]


def _shares(query: Tensor, key: Tensor, scale: float, side: int | None) -> Tensor:
    """`[H, Q, K]`, the attention of each query of one row to its keys, in fp32."""
    scores = torch.einsum("qhd,khd->hqk", query, key).float() * scale
    if side is not None:
        place = torch.arange(len(key))
        scores = scores.masked_fill(
            (place[-len(query) :, None] - place).abs() > side, float("-inf")
        )
    return scores.softmax(-1)


class AnyDevice(CPUAccelerator):
    """Lightning's accelerator that asks for no CPU."""

    def setup_device(self, device: torch.device) -> None:
        return


class OneDevice(SingleDeviceStrategy):
    """Lightning's strategy for a single device, which is this one."""

    def __init__(self) -> None:
        super().__init__(torch.device(NAME, 0), AnyDevice())
