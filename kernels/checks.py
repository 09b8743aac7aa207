"""Argument checks of several kernels: a wrong argument raises an error instead of a device fault."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from pensieve.kernels.arguments import Logits

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_given(
    expected: Iterable[tuple[str, torch.Tensor | None, tuple[int, ...]]],
    dtype: torch.dtype,
    *others: torch.dtype,
) -> list[torch.Tensor]:
    """Return the given tensors among (name, tensor, shape). Raises ValueError on another shape, or on a dtype that
    is neither ``dtype`` nor one of ``others``."""
    given = []
    for name, tensor, shape in expected:
        if tensor is not None:
            if tensor.shape != shape or tensor.dtype not in (dtype, *others):
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")
            given.append(tensor)
    return given


def check_layout(tensors: Sequence[torch.Tensor]) -> None:
    """Raises ValueError unless the last dimension of each is contiguous."""
    if any(tensor.stride(-1) != 1 and tensor.shape[-1] > 1 for tensor in tensors):
        raise ValueError("the last dimension of every tensor must be contiguous")


def check_device(tensors: Sequence[torch.Tensor]) -> None:
    """Raises ValueError unless all tensors are on one device."""
    if any(tensor.device != tensors[0].device for tensor in tensors):
        raise ValueError("all tensors must be on one device")


def check_window(window: int | None) -> None:
    """Raises ValueError unless the attention window is positive or None."""
    if window is not None and window < 1:
        raise ValueError(f"an attention window of {window} tokens: at least 1")


def check_logits(q: torch.Tensor, logits: Logits) -> None:
    """Raises ValueError unless ``logits`` fit queries [T, Hq, D]."""
    scale, softcap, sinks = logits
    if not scale > 0:
        raise ValueError(f"scale must be positive, not {scale}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, not {softcap}")
    if sinks is not None:
        if sinks.shape != q.shape[1:2] or sinks.dtype not in FLOAT_DTYPES or not sinks.is_contiguous():
            raise ValueError(
                f"sinks are {sinks.dtype} {tuple(sinks.shape)}: one float per query head, [{q.shape[1]}]"
            )
        check_device([q, sinks])
