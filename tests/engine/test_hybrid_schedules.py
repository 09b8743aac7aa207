"""Random sessions on models with two KV groups: every answer equals a stateless run, whatever happens to the slices."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from pensieve.config import CacheConfig, CacheGroup, SchedulerConfig
from pensieve.engine.cache import tails
from pensieve.engine.cache.chunk import CachedSession, Chunk, Slice
from pensieve.engine.cache.tails import Tails
from pensieve.engine.cache.tiers import Tiers
from pensieve.engine.plan import Chain
from support.engine.engine_driver import Clock, Driver, make_engine
from support.engine.hash_worker import VOCABULARY
from support.engine.hybrid_worker import HybridOracle, HybridWorker
from support.lengths import at_length, seeds

SIZE = 4
FULL = CacheGroup("full", 0, 2, SIZE, 3)
NO_LAYERS = CacheGroup("full", 0, 0, 0, 1)
STATE = CacheGroup("state", 0, 3, 3, 2)


def window(width: int, layers: int = 3, unit: int = 2) -> CacheGroup:
    return CacheGroup("window", width, layers, SIZE, unit)


MODELS = {
    "window of 6": (FULL, window(6)),
    "window of 13, one layer": (FULL, window(13, 1, 1)),
    "window alone": (NO_LAYERS, window(9)),
    "state": (FULL, STATE),
    "state alone": (NO_LAYERS, STATE),
}
TIERS = ((26, 20), (26, 0), (40, 60), (20, 8))
TIGHT = ((9, 4), (9, 20), (11, 8), (13, 8), (10, 0))
"""Running requests often pin such a tier to its last page."""


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are promised room for a window and two chunks: slices come and go within these short contexts."""
    monkeypatch.setattr(tails, "LEAST_SPAN", 2 * SIZE)


def play(name: str, seed: int, tiers: Sequence[tuple[int, int]] = TIERS) -> Driver:
    """One random schedule, every answer and each step's cache checked. ``tiers``: chunks of the device and the host."""
    rng = random.Random(seed)
    device, host = rng.choice(tiers)
    if name == "state alone":
        device //= 5  # a request takes four pages at most
    cache = CacheConfig(device, host, SIZE, groups=MODELS[name])
    scheduler = SchedulerConfig(
        48, max_batch_tokens=rng.choice((8, 24, 100)), max_running=rng.choice((2, 4, 8))
    )
    engine = make_engine(cache, scheduler, HybridWorker(cache), clock := Clock(), overlapped=seed % 2 == 1)
    verify, limit = HybridOracle(MODELS[name]).verify, engine._scheduler.context_limit
    driver = Driver(engine, clock, rng, verify, VOCABULARY, limit)
    driver.tenants = seed % 3 == 0
    driver.groups = 0.15
    for _ in range(120):
        driver.act()
        driver.step()
    driver.run_until_idle()
    return driver


@pytest.mark.parametrize("name", MODELS)
def test_answers_equal_a_stateless_run(name: str) -> None:
    paths: Counter[str] = Counter()
    for seed in seeds(8, 600):
        driver = play(name, seed, TIERS if seed % 4 or "alone" in name else TIGHT)
        for turn in driver.finished:
            assert turn.usage is not None and turn.usage.reconciles
            paths["device"] += turn.usage.gpu_cached_tokens
            paths["host"] += turn.usage.swapped_in_tokens
            paths["recomputed"] += turn.usage.recomputed_tokens
        paths["suspended"] += driver.engine.stats().suspensions_total
        paths["moved"] += sum(len(plan.copies) for plan in driver.engine._worker.plans)
    needed = {"device", "host", "recomputed"}
    if "alone" not in name:
        needed |= {"suspended", "moved"}  # contexts grow, and both groups compete for the room
    assert needed <= set(+paths), f"a path was never taken: {paths}"


@pytest.mark.parametrize(
    "seeds", [(45, 49, 113), (135,), at_length(range(4), range(500))], ids=["room", "branch", "more"]
)
@pytest.mark.parametrize("name", ["window of 6", "window of 13, one layer", "state"])
def test_a_tier_that_is_pinned_to_its_last_page(name: str, seeds: Sequence[int]) -> None:
    """*room*: a request held its next window besides slices that it had found far ahead, and no page was left.
    *branch*: room was made for a candidate's last chunk, by saving a slice that the candidate then loaded in the same
    plan."""
    for seed in seeds:
        play(name, seed, TIGHT)


def test_a_host_page_is_written_once() -> None:
    """A request was suspended whose chunks another had as well. Its own were freed, one of them while it was saved, and
    the same plan saved another slice to that host page."""
    play("window of 13, one layer", 258)


def test_a_state_is_written_once() -> None:
    """Two candidates computed their common beginning in one plan, one of them only the part of a chunk for which there
    was room, and both stored a state in that chunk's slice."""
    play("state", 770140, TIGHT)


def test_a_warm_up_that_finds_all_of_its_context_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan was empty, so no step ended that could remove it, and the engine never idled."""
    monkeypatch.setattr(tails, "LEAST_SPAN", 16)
    play("window alone", 7_000_424, TIERS)


def short_window(self: Tails, position: int) -> int:
    """A slice falls behind one position too early."""
    return reach(self, position + 1)


def uncut(self: Tails, chunk: Chunk, valid: int) -> None:
    """A state stays although other tokens follow."""


def from_live(self: Tails, session: CachedSession, first_span: int) -> Iterator[Chain]:
    """What begins at position 0 goes on from a state that is there already."""
    for chain in chains(self, session, first_span):
        yield msgspec.structs.replace(chain, read=chain.live) if chain.read < 0 else chain


def moved_and_saved(self: Tiers, part: Slice) -> int:
    """A slice that was moved in the plan being made is copied from where it will be."""
    return part.device


def one_chunk_late(self: Tails, chunks: Sequence[Chunk]) -> list[list[int]]:
    """A state counts as that of the next boundary."""
    full, states = have(self, chunks)
    return [full, [0, *states[:-1]]]


def kept_pinned(self: Tiers, parts: Iterable[Slice]) -> None:
    """What a request has let go of stays pinned."""
    unpin(self, [part for part in parts if isinstance(part, Chunk)])


reach: Callable[..., int] = Tails._reach
chains: Callable[..., Iterator[Chain]] = Tails.chains
have: Callable[..., list[list[int]]] = Tails._have
unpin: Callable[..., None] = Tiers.unpin
MUTANTS: dict[str, tuple[str, type, str, Callable[..., Any]]] = {
    "window: one token short": ("window of 6", Tails, "_reach", short_window),
    "state: kept after a cut": ("state", Tails, "truncate", uncut),
    "state: live instead of zero": ("state", Tails, "chains", from_live),
    "state: one chunk late": ("state", Tails, "_have", one_chunk_late),
    "page: saved from where it moves": ("window of 6", Tiers, "_read_from", moved_and_saved),
    "slice: pinned after the request": ("window of 6", Tiers, "unpin", kept_pinned),
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, owner, method, broken = MUTANTS[fault]
    monkeypatch.setattr(owner, method, broken)
    for seed in (11, *range(60)):  # few others notice that a page is saved from where it moves
        try:
            play(name, seed)
        except (AssertionError, ValueError):
            return
    raise AssertionError("no schedule notices the fault")
