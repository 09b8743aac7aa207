"""What both workers must do with windows: each case runs one context and compares its logits with a stateless run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from pensieve.engine.plan import Copy
from support.engine.window_driver import CHUNK, GONE, WindowContext
from support.engine.worker_driver import random_tokens, reference_logprobs

CUTS = [(0, 1), (1, 14), (14, 16), (16, 40), (40, 41), (41, 42), (42, 61), (61, 62)]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def pages_behind_the_window_are_freed(folder: Path, device: str) -> None:
    tokens = random_tokens(62)
    context, want = WindowContext(folder, tokens, device), reference_logprobs(folder, tokens)
    for start, end in CUTS:
        close(context.run((start, end)), want[end - 1])
        context.leave_behind(end)
    # Position 62 sees positions 54 to 61: three chunks.
    assert context.window == 9 and context.device.used(1) == 3
    context.close()


def slices_come_back_from_the_host(folder: Path, device: str) -> None:
    tokens = random_tokens(50)
    context = WindowContext(folder, tokens, device)
    context.run((0, 45))
    context.leave_behind(45)
    saved = {
        (group, chunk): context.host.take(group)
        for group in (0, 1)
        for chunk, page in enumerate(context.pages[group])
        if page != GONE and context.pools.groups[group].layers
    }
    context.swap_out = tuple(
        Copy(context.pages[group][chunk], page, group) for (group, chunk), page in saved.items()
    )
    mine = context.tokens, context.pages
    # Another context's step, in whose plan the slices go out.
    context.tokens, context.pages = np.array(random_tokens(8, seed=3), np.int32), [[GONE] * 2, [GONE] * 2]
    context.run((0, 8))
    context.tokens, context.pages = mine
    context.finish()
    for group in (0, 1):
        context.free(group, range(12))
    copies = []
    for (group, chunk), page in reversed(saved.items()):
        context.pages[group][chunk] = context.device.take(group)
        copies.append(Copy(page, context.pages[group][chunk], group))
    context.swap_in = tuple(copies)
    close(context.run((45, 50)), reference_logprobs(folder, tokens)[-1])
    context.close()


def a_group_that_holds_a_position_is_not_written(folder: Path, device: str) -> None:
    """The window slices are lost: all is computed again, and what the full group holds stays as it is."""
    tokens = random_tokens(40)
    context = WindowContext(folder, tokens, device)
    context.run((0, 38))
    context.finish()
    context.free(1, range(10))
    before = context.contents(0)[:, :9]
    context.run((0, 20), stores=2)
    context.leave_behind(20)
    context.run((20, 38), stores=2)
    close(context.run((38, 40)), reference_logprobs(folder, tokens)[-1])
    assert torch.equal(context.contents(0)[:, :9], before)
    context.close()


def a_dropped_front_is_computed_in_scratch_pages(folder: Path, device: str) -> None:
    """The full group's first chunks are gone. Their positions need windows of their own, beside those of the end."""
    tokens = random_tokens(40)
    context = WindowContext(folder, tokens, device)
    context.run((0, 38))
    context.leave_behind(38)
    context.free(0, range(12 // CHUNK))
    close(context.run((0, 12), (38, 40)), reference_logprobs(folder, tokens)[-1])
    context.close()


CASES = (
    pages_behind_the_window_are_freed,
    slices_come_back_from_the_host,
    a_group_that_holds_a_position_is_not_written,
    a_dropped_front_is_computed_in_scratch_pages,
)
