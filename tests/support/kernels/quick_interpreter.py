"""A plugin of pytest that makes Triton's interpreter faster: it computes the same, in half the time.

The interpreter replaces the functions of ``triton.language`` at each call of a device function, although those of
the same modules are still replaced since the launch of the kernel. It builds a table of dtypes at each use. It also
computes for each sum and product of integers whether it overflows, and, as without ``debug`` a device assertion does
nothing, never looks at the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_replace, _launch, _numpy_dtype = (
    interpreter._patch_lang,
    interpreter.GridExecutor.__call__,
    interpreter._get_np_dtype,
)
_modules_of: dict[int, tuple[bool, bool]] = {}
_replaced: set[tuple[bool, bool]] = set()
_numpy_dtypes: dict[str, Any] = {}


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


for owner, name, ours in (
    (interpreter, "_patch_lang", _replace_once),
    (interpreter.GridExecutor, "__call__", _launch_anew),
    (interpreter, "_get_np_dtype", _known_dtype),
):
    setattr(owner, name, ours)
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
