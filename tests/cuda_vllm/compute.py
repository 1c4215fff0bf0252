"""Lets the fake CUDA compute: what PyTorch and Triton launch runs on the CPU, over the same memory, in stream order.

Each ATen operator on CUDA tensors becomes a host function on its stream, which calls the same operator on CPU tensors
that share the memory. Shapes come from meta tensors, so the caller does not wait; only an operator whose shape depends
on values waits for its stream, as on a GPU. Copies between host and device are the driver's own. Triton's kernels run
in Triton's interpreter.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fake_cuda import NAME

Work = Callable[[], Any]
A = torch.ops.aten

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_driver = ctypes.CDLL(NAME)
_driver.cudaLaunchHostFunc.argtypes = [ctypes.c_void_p, _HOST_FUNCTION, ctypes.c_void_p]
_queued: dict[int, tuple[Work, bool]] = {}
_numbers = itertools.count(1)
_shapes: dict[Any, Any] = {}
"""The results of operators as meta tensors, by the operator and the kinds of its arguments."""
_generators: dict[int, torch.Generator] = {}

errors: list[str] = []
"""Work that raised on its stream, and operators that nothing computes."""
kernels: dict[str, int] = {}
"""How often each Triton kernel and each replaced operator was queued."""
pieces = 0
"""How many pieces of work were queued."""


@_HOST_FUNCTION
def _run(number: int) -> None:
    work, keep = _queued[number]
    if not keep:
        del _queued[number]
    try:
        with torch.inference_mode():
            work()
    except BaseException:
        errors.append(traceback.format_exc())


def queue(work: Work) -> None:
    """Run ``work`` when the current stream comes to it. A graph that is being captured runs it at each replay."""
    global pieces
    pieces += 1
    number = next(_numbers)
    _queued[number] = (work, torch.cuda.is_current_stream_capturing())
    _driver.cudaLaunchHostFunc(torch.cuda.current_stream().cuda_stream, _run, number)


def is_cuda(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "cuda"


def on_cpu(x: Any) -> Any:
    """A CPU tensor over the memory of a CUDA tensor; what is no CUDA tensor as the driver would read it later.

    The driver stages pageable memory when it is asked, and reads pinned memory when the stream comes to it.
    """
    if is_cuda(x):
        return _alias(x)
    if isinstance(x, torch.Tensor) and x.device.type == "cpu" and not x.is_pinned():
        return x.clone()
    if isinstance(x, torch.Generator) and x.device.type == "cuda":
        return _generators.setdefault(id(x), torch.Generator().manual_seed(x.initial_seed()))
    return x


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    with _disable_current_modes():
        if storage.nbytes() == 0 or tensor.numel() == 0:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        memory = _memory(storage.data_ptr(), storage.nbytes())
        alias = torch.empty(0, dtype=tensor.dtype)
        return alias.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


@functools.lru_cache(4096)
def _memory(address: int, size: int) -> torch.UntypedStorage:
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8).untyped_storage()


def _operators(*names: str) -> frozenset[Any]:
    found = set()
    for name in names:
        packet, _, overload = name.partition(".")
        operator = getattr(A, packet)
        found |= {getattr(operator, overload)} if overload else {getattr(operator, one) for one in operator.overloads()}
    return frozenset(found)


LAUNCH_NOTHING = _operators(
    *("empty.memory_format", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "set_"),
    *("resize_", "record_stream", "is_pinned", "_pin_memory", "sym_size", "sym_stride", "sym_numel"),
    *("sym_storage_offset", "detach", "is_same_size", "_reshape_alias", "is_set_to"),
)
DEPEND_ON_VALUES = _operators(
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_static", "masked_select", "_unique2"),
    *("unique_dim", "unique_consecutive", "repeat_interleave.Tensor", "bincount", "allclose"),
)

REPLACED: dict[str, Callable[..., Any]] = {}
"""Custom operators in place of the extension's kernels: functions of CPU tensors that write their results."""
INLINE = {"_C::weak_ref_tensor"}
"""Custom operators that launch nothing."""
IN_PYTHON: dict[str, Callable[..., Any]] = {}
"""Custom operators written in Python, which call other operators."""


class Compute(TorchDispatchMode):
    """While it is entered, operators of the calling thread compute."""

    def __init__(self) -> None:
        super().__init__()
        self._composite: dict[Any, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        has = any(map(is_cuda, pytree.tree_leaves((args, kwargs))))
        device = kwargs.get("device")
        to_cuda = device is not None and torch.device(device).type == "cuda"
        if not (has or to_cuda) or func in LAUNCH_NOTHING:
            return func(*args, **kwargs)
        if self._is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if _is_view(func):
            return func(*args, **kwargs)
        if func is A.copy_.default:
            return _copy(*args, **kwargs)
        if func is A._to_copy.default:
            return _to_copy(*args, **kwargs)
        if func.namespace not in ("aten", "prims"):
            return self._custom(func, args, kwargs)
        own, named = pytree.tree_map(on_cpu, (args, kwargs))
        if to_cuda:
            named["device"] = torch.device("cpu")
        if not has:
            return _send(func(*own, **named))
        if func in DEPEND_ON_VALUES or _indexes_by_mask(func, args):
            torch.cuda.current_stream().synchronize()
            return pytree.tree_map_only(torch.Tensor, _send, func(*own, **named))
        if any(_is_written(argument) for argument in func._schema.arguments):
            queue(lambda: func(*own, **named))
            return _written(func, args, kwargs)
        return _with_outputs(func, args, kwargs, own, named)

    def _is_composite(self, func: Any) -> bool:
        """In inference mode operators that consist of others arrive whole."""
        if func not in self._composite:
            implicit = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
            self._composite[func] = implicit
        return self._composite[func]

    def _custom(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.name().partition(".")[0]
        if name in INLINE:
            return func(*args, **kwargs)
        if (replacement := REPLACED.get(name)) is not None:
            kernels[name] = kernels.get(name, 0) + 1
            own, named = pytree.tree_map(on_cpu, (args, kwargs))
            queue(lambda: replacement(*own, **named))
            return None
        if (written := IN_PYTHON.get(name)) is not None:
            with self:
                return written(*args, **kwargs)
        errors.append(f"nothing computes {func}")
        return func(*args, **kwargs)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _indexes_by_mask(func: Any, args: Any) -> bool:
    masks = (torch.bool, torch.uint8)
    return func is A.index.Tensor and any(isinstance(one, torch.Tensor) and one.dtype in masks for one in args[1])


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """The arguments that an operator has written, as it returns them."""
    arguments = func._schema.arguments
    values = dict(zip((one.name for one in arguments), args, strict=False)) | kwargs
    outs = [values[one.name] for one in arguments if _is_written(one)]
    returned = len(func._schema.returns)
    return None if returned == 0 else outs[0] if returned == 1 else tuple(outs)


def _with_outputs(func: Any, args: Any, kwargs: Any, own: Any, named: Any) -> Any:
    leaves, structure = pytree.tree_flatten((args, kwargs))
    call = (func, str(structure), *map(_kind, leaves))
    if call not in _shapes:
        with _disable_current_modes():
            there, there_named = pytree.tree_map_only(torch.Tensor, _meta, (args, kwargs))
            if "device" in there_named:
                there_named["device"] = torch.device("meta")
            _shapes[call] = func(*there, **there_named)
    out = pytree.tree_map_only(torch.Tensor, _empty_like, _shapes[call])
    targets = [_alias(one) for one in pytree.tree_leaves(out) if isinstance(one, torch.Tensor)]

    def work() -> None:
        results = [one for one in pytree.tree_leaves(func(*own, **named)) if isinstance(one, torch.Tensor)]
        for target, result in zip(targets, results, strict=True):
            target.copy_(result)

    queue(work)
    return out


def _kind(leaf: Any) -> Any:
    """All of an argument that the shapes of results depend on."""
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.size()), leaf.stride(), leaf.dtype, leaf.device.type
    return type(leaf), leaf


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _empty_like(meta: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device="cuda")


def _send(made: torch.Tensor) -> torch.Tensor:
    out = _empty_like(made)
    target = _alias(out)
    queue(lambda: target.copy_(made))
    return out


def _copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    alike = to.dtype == source.dtype and to.size() == source.size() and to.is_contiguous() and source.is_contiguous()
    if alike and to.device.type != source.device.type:
        return A.copy_.default(to, source, non_blocking)
    target = _alias(to) if is_cuda(to) else to
    own = on_cpu(source)
    queue(lambda: target.copy_(own))
    if not is_cuda(to) and not (non_blocking and to.is_pinned()):
        torch.cuda.current_stream().synchronize()
    return to


def _to_copy(
    source: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
    **_: Any,
) -> torch.Tensor:
    device = source.device if device is None else torch.device(device)
    dtype = dtype or source.dtype
    if device.type == "meta":
        return A._to_copy.default(source, dtype=dtype, device=device)
    like = torch.empty_like(_meta(source), dtype=dtype, memory_format=memory_format or torch.preserve_format)
    is_pinned = non_blocking and device.type == "cpu"
    made = torch.empty_strided(like.size(), like.stride(), dtype=dtype, device=device, pin_memory=is_pinned)
    return _copy(made, source, non_blocking)


def replace_triton() -> None:
    """Queue Triton's kernels, which its interpreter runs, on their streams. Before that, TRITON_INTERPRET is set."""
    from triton.runtime import interpreter

    call, turn = interpreter.GridExecutor.__call__, threading.RLock()

    def queued(self: Any, *args: Any, **kwargs: Any) -> None:
        name = getattr(self.fn, "__name__", "?")
        kernels[name] = kernels.get(name, 0) + 1
        own, named = pytree.tree_map_only(torch.Tensor, _alias_if_cuda, (list(args), dict(kwargs)))

        def work() -> None:
            with turn:  # the interpreter patches Triton's own language while a kernel runs
                call(self, *own, **named)

        queue(work)

    interpreter.GridExecutor.__call__ = queued
    interpreter.GridExecutor._init_args_hst = lambda self, args, kwargs: (list(args), dict(kwargs))
    interpreter.GridExecutor._restore_args_dev = lambda self, *args: None


def _alias_if_cuda(tensor: torch.Tensor) -> torch.Tensor:
    return _alias(tensor) if is_cuda(tensor) else tensor


def queued_function(function: Callable[..., None], name: str) -> Callable[..., None]:
    """A launch of ``function``, which takes CPU tensors, on the current stream."""

    def launch(*args: Any, **kwargs: Any) -> None:
        kernels[name] = kernels.get(name, 0) + 1
        own, named = pytree.tree_map(on_cpu, (args, kwargs))
        queue(lambda: function(*own, **named))

    return launch


def take_errors() -> list[str]:
    """The ends of the errors so far, which are forgotten."""
    taken = [error[-2000:] for error in errors]
    errors.clear()
    return taken
