"""What is shared, against brute force: the order of victims, and what a random context may and must find."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from pensieve.config import PolicyName
from pensieve.core import SessionKey
from pensieve.engine.cache.chunk import Chunk, tokens_in
from pensieve.engine.cache.index import Reclaim
from pensieve.engine.cache.manager import CacheManager
from support.cache.cache_rig import (
    begin,
    chunks,
    commit,
    compute,
    end,
    joined,
    make,
    owners,
    receipt,
    serve,
    text,
    victims,
)


@pytest.mark.parametrize(
    ("policy", "combined"),
    [("retention", sum), ("gittins", sum), ("lru", max), ("whole-session", max)],
)
@pytest.mark.parametrize("seed", range(3))
def test_victims_are_those_of_brute_force(
    policy: PolicyName, combined: Callable[[list[float]], float], seed: int
) -> None:
    cache = make(4000, 0, policy)
    rng = np.random.default_rng(seed)
    for number in range(40):
        prompt = text(40)[: int(rng.integers(41))] if rng.random() < 0.7 else text(0)
        own = text(int(rng.integers(1, 30)), seed=number + 1)
        serve(cache, f"s{number}", joined(prompt, own), float(rng.random() * 50))
    for number in rng.integers(40, size=8):
        cache.evict(SessionKey(f"s{number}"))

    def worth(chunk: Chunk) -> float:
        cost = 4.0 * chunk.index + 8.0 if combined is sum else 1.0  # nothing is learned of returns yet
        return cost * combined([1.0 / (100.0 - owner.last_active) for owner in owners(chunk)])

    every = {id(chunk): chunk for session in cache.sessions.values() for chunk in session.chunks}
    found = victims(cache, Reclaim.SAVED_PAGE, 100.0, len(every))
    assert {id(chunk) for chunk in found} == set(every) and len(found) == len(every)
    assert sum(chunk.shared for chunk in found) > 5
    assert np.allclose([worth(chunk) for chunk in found], sorted(map(worth, every.values())))
    few = victims(cache, Reclaim.SAVED_PAGE, 100.0, 8)
    assert np.allclose([worth(chunk) for chunk in few[:8]], [worth(chunk) for chunk in found[:8]])


def test_an_owner_that_leaves_takes_its_claim_along() -> None:
    cache = make()
    serve(cache, "A", text(40)[:9], 0.0)
    serve(cache, "B", joined(text(40)[:8], text(1, seed=1)), 0.0)
    serve(cache, "C", text(9, seed=2), 4.0)
    # at t=10: chunk 0 of A and B 8 / 10 + 8 / 10, chunk 0 of C 8 / 6
    assert victims(cache, Reclaim.SAVED_PAGE, 10.0, 1)[0] is chunks(cache, "C")[0]
    cache.evict(SessionKey("B"))
    assert victims(cache, Reclaim.SAVED_PAGE, 10.0, 1)[0] is chunks(cache, "A")[0]


# -- random contexts -------------------------------------------------------------------------------------------------


class Model:
    """What sessions of a scope have computed, as prefixes of tokens; it knows of no chunk but those of one context."""

    def __init__(self, cache: CacheManager) -> None:
        self.cache = cache
        self.computed: dict[str, set[tuple[int, ...]]] = {}

    def most(self, scope: str, context: tuple[int, ...]) -> int:
        """Tokens of a context that somebody in the scope has computed."""
        known = self.computed.get(scope, set())
        return max((n for n in range(1, len(context) + 1) if context[:n] in known), default=0)

    def least(self, scope: str, context: tuple[int, ...]) -> int:
        """Tokens in full chunks that some idle session of the scope has on the device, but for the last one."""
        size = self.cache.config.chunk_tokens
        present: set[int] = set()
        for session in self.cache.sessions.values():
            if session.scope != scope or session.running:
                continue
            mine = tuple(session.tokens.tolist())
            for chunk in session.chunks[: (len(context) - 1) // size]:
                stop = (chunk.index + 1) * size
                if mine[:stop] == context[:stop] and chunk.filled == size and chunk.device >= 0:
                    present.add(chunk.index)
        return len(present) * size

    def learn(self, scope: str, context: tuple[int, ...]) -> None:
        self.computed.setdefault(scope, set()).update(context[:n] for n in range(1, len(context) + 1))


@pytest.mark.parametrize("seed", range(16))
def test_a_context_finds_what_it_must_and_no_more(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice((1, 2, 4))
    device = rng.choice((12, 24, 60)) * 4 // size
    policy: PolicyName = rng.choice(("retention", "gittins", "lru", "trailing-half", "whole-session"))
    cache = make(device, rng.choice((0, device // 2, 3 * device)), policy, size=size, watermark=rng.random())
    model = Model(cache)
    prompts = [text(count, seed=count) for count in (4, 9, 17, 24)]
    found = shared = 0
    for now in range(120):
        scope = rng.choice(("a", "a", "b"))
        names = [f"{scope}{rng.randrange(4)}"]
        if rng.random() < 0.3:
            names = rng.sample([f"{scope}{number}" for number in range(4)], 2)  # into one plan
        if rng.random() < 0.08:
            cache.evict(SessionKey(names[0]))
        begun: list[str] = []
        for name in names:
            context = joined(
                rng.choice(prompts)[: rng.randrange(1, 25)],
                *(text(rng.randrange(1, 6), seed=rng.choice((77, 78))) for _ in range(rng.randrange(2))),
            )
            ids_of = tuple(context.tolist())
            path = cache.prefix_path(SessionKey(name), scope, context)
            if not cache.can_admit(SessionKey(name), context, len(context), path=path):
                continue
            least, most = model.least(scope, ids_of), model.most(scope, ids_of)
            restore = begin(cache, name, context, float(now), scope=scope)
            on_device, on_host, recomputed, new = receipt(restore, context)
            assert on_device + on_host + recomputed + new == len(context)
            assert tokens_in(restore.missing) == recomputed + new > 0
            assert least <= on_device and on_device + on_host <= min(most, len(context) - 1)
            compute(cache, name, restore)
            model.learn(scope, ids_of)
            found += on_device + on_host
            begun.append(name)
        cache.swap_out_ahead(float(now), 4)
        commit(cache)
        for name in begun:
            answer = text(rng.randrange(1, 4), seed=78)
            session = cache._running[SessionKey(name)]
            before = session.tokens
            if cache._tiers.unpinned_bytes() > 4 and rng.random() < 0.5:
                end(cache, name, float(now), answer)
                model.learn(scope, tuple(joined(before, answer).tolist()))
            else:
                end(cache, name, float(now))
            commit(cache)
            shared += sum(chunk.shared for chunk in chunks(cache, name))
    assert found and shared
