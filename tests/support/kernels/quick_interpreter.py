"""A plugin of pytest that makes Triton's interpreter faster: it computes the same, in a third of the time.

The interpreter replaces the functions of ``triton.language`` at each call of a device function, although those of
the same modules are still replaced since the launch of the kernel. It builds a table of dtypes at each use. It also
computes for each sum and product of integers whether it overflows, and, as without ``debug`` a device assertion does
nothing, never looks at the result. Each value gets a type and a shape of its own, made of a dozen objects, although a
kernel has few different ones, and two values of one shape are compared dimension by dimension to broadcast them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_replace, _launch, _numpy_dtype = (
    interpreter._patch_lang,
    interpreter.GridExecutor.__call__,
    interpreter._get_np_dtype,
)
_describe_block, _broadcast = tl.block_type.__init__, TritonSemantic.broadcast_impl_value
_modules_of: dict[int, tuple[bool, bool]] = {}
_replaced: set[tuple[bool, bool]] = set()
_numpy_dtypes: dict[str, Any] = {}
_blocks: dict[tuple[Any, ...], Any] = {}
_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
_shape_of: dict[int, tuple[Any, Any]] = {}
"""Shape and number of elements of tensors, by the identity of their type in ``_blocks``."""
_NO_SHAPE = tl.tuple([]), tl.constexpr(1)


class _Kept:
    """A scope that has changed nothing."""

    def restore(self) -> None:
        pass


def _replace_once(fn: Callable[..., Any]) -> Any:
    space = fn.__globals__
    modules = _modules_of.get(id(space))
    if modules is None:
        modules = (any(x is tl for x in space.values()), any(x is tl.core for x in space.values()))
        _modules_of[id(space)] = modules
    if modules in _replaced:
        return _Kept()
    _replaced.add(modules)
    return _replace(fn)


def _launch_anew(executor: Any, *args: Any, **kwargs: Any) -> None:
    _replaced.clear()
    _launch(executor, *args, **kwargs)


def _known_dtype(dtype: Any) -> Any:
    if dtype.name not in _numpy_dtypes:
        _numpy_dtypes[dtype.name] = _numpy_dtype(dtype)
    return _numpy_dtypes[dtype.name]


def _known_block(cls: Any, element_ty: Any, shape: Any) -> Any:
    """The one type of blocks of this shape and these elements."""
    space = getattr(element_ty, "address_space", None)
    key = (
        element_ty.name,
        space,
        *(size.value if isinstance(size, tl.constexpr) else size for size in shape),
    )
    if key not in _blocks:
        _blocks[key] = object.__new__(cls)
    return _blocks[key]


def _describe_once(block: Any, element_ty: Any, shape: Any) -> None:
    if "name" not in block.__dict__:
        _describe_block(block, element_ty, shape)
        sizes = tuple(block.shape)
        if sizes not in _shapes:
            _shapes[sizes] = tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(block.numel)
        _shape_of[id(block)] = _shapes[sizes]


def _make_tensor(tensor: Any, handle: Any, kind: Any) -> None:
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.shape, tensor.numel = _shape_of[id(kind)] if kind.is_block() else _NO_SHAPE


def _broadcast_others(semantic: Any, lhs: Any, rhs: Any) -> Any:
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast(semantic, lhs, rhs)


for owner, name, ours in (
    (tl.block_type, "__new__", _known_block),
    (tl.block_type, "__init__", _describe_once),
    (tl.tensor, "__init__", _make_tensor),
    (TritonSemantic, "broadcast_impl_value", _broadcast_others),
    (interpreter, "_patch_lang", _replace_once),
    (interpreter.GridExecutor, "__call__", _launch_anew),
    (interpreter, "_get_np_dtype", _known_dtype),
):
    setattr(owner, name, ours)
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
