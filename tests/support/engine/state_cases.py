"""What both workers must do with states: each case runs one context and compares its logits with a stateless run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from pensieve.engine.plan import NO_PAGE, Copy
from support.engine.state_driver import StateContext
from support.engine.worker_driver import reference_logprobs


def random_tokens(count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, 119, count).tolist()
    return found


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)


def a_live_page_is_updated_in_place(folder: Path, device: str) -> None:
    tokens = random_tokens(90)
    context, want = StateContext(folder, tokens, device), reference_logprobs(folder, tokens)
    live = context.state_page()
    close(context.run([(0, 3)], NO_PAGE, live), want[2])
    for start, end in ((3, 4), (4, 5), (5, 21), (21, 22), (22, 88), (88, 89)):
        close(context.run([(start, end)], live, live), want[end - 1])
    assert context.device.used(1) == 1
    context.close()


def a_cut_goes_on_from_a_boundary(folder: Path, device: str) -> None:
    """The step that crosses the boundary leaves a state there. A context with another end goes on from it."""
    tokens = random_tokens(50)
    context = StateContext(folder, tokens, device)
    live, boundary = context.state_page(), context.state_page()
    context.run([(0, 7), (7, 31)], NO_PAGE, live, (boundary, 28))
    close(context.run([(31, 50)], live, live), reference_logprobs(folder, tokens)[-1])
    context.free_state(live)
    other = [*tokens[:30], *random_tokens(15, seed=1)]
    context.tokens = np.array(other, np.int32)
    close(context.run([(28, 45)], boundary, context.state_page()), reference_logprobs(folder, other)[-1])
    # The boundary's page was read only: a third context goes on from it, too.
    context.tokens = np.array(tokens, np.int32)
    close(context.run([(28, 50)], boundary, context.state_page()), reference_logprobs(folder, tokens)[-1])
    context.close()


def a_chain_ends_at_its_boundary(folder: Path, device: str) -> None:
    tokens = random_tokens(40)
    context, want = StateContext(folder, tokens, device), reference_logprobs(folder, tokens)
    pages = [context.state_page() for _ in range(3)]
    close(context.run([(0, 24)], NO_PAGE, boundary=(pages[0], 24)), want[23])
    close(context.run([(24, 25)], pages[0], pages[1]), want[24])
    close(context.run([(25, 32)], pages[1], pages[1], (pages[2], 32)), want[31])
    context.free_state(pages[1])
    close(context.run([(32, 40)], pages[2], pages[2]), want[39])
    context.close()


def a_state_comes_back_from_the_host(folder: Path, device: str) -> None:
    tokens = random_tokens(40)
    context, want = StateContext(folder, tokens, device), reference_logprobs(folder, tokens)
    live, boundary = context.state_page(), context.state_page()
    context.run([(0, 34)], NO_PAGE, live, (boundary, 32))
    saved = context.host.take(1)
    context.swap_out = (Copy(boundary, saved, 1),)
    context.run([(34, 35)], live, live)
    context.free_state(live)
    context.free_state(boundary)
    target = context.state_page()
    context.swap_in = (Copy(saved, target, 1),)
    close(context.run([(32, 40)], target, target), want[39])
    context.close()


def states_are_computed_again_beside_what_is_held(folder: Path, device: str) -> None:
    """All states are lost: the whole context is computed from zeros, and the full group is not written."""
    tokens = random_tokens(40)
    context, want = StateContext(folder, tokens, device), reference_logprobs(folder, tokens)
    live = context.state_page()
    context.run([(0, 38)], NO_PAGE, live)
    context.free_state(live)
    before = context.full_pages()
    live = context.state_page()
    context.run([(0, 38)], NO_PAGE, live, stores=2)
    assert torch.equal(context.full_pages(), before)
    close(context.run([(38, 40)], live, live), want[39])
    context.close()


CASES = (
    a_live_page_is_updated_in_place,
    a_cut_goes_on_from_a_boundary,
    a_chain_ends_at_its_boundary,
    a_state_comes_back_from_the_host,
    states_are_computed_again_beside_what_is_held,
)
