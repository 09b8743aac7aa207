"""What drafts cost, as an engine learns it from its steps, and which of them it takes."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost import CostModel
from pensieve.engine.scheduling.drafting import Drafting, _Proposal
from pensieve.engine.scheduling.drafts import COMPARED_AFTER, StepCosts

FREE = CostModel(((0, 0.0), (4096, 1e-6)), 1e-6, 32)


def decoded(costs: StepCosts, requests: int, drafts: int, idle: float | None = None) -> None:
    costs.on_step(requests, drafts, 0.010 + 0.0004 * requests + 0.0001 * drafts, idle)


def test_the_price_is_that_of_a_draft_and_not_of_a_request() -> None:
    costs = StepCosts()
    assert costs.price(4) == 0.0
    for requests in (4, 12, 9) * 20:
        decoded(costs, requests, 0)
    assert costs.price(4) == 0.0  # no draft was seen
    for requests, drafts in ((4, 2), (12, 1), (9, 4), (4, 9)) * 20:
        decoded(costs, requests, drafts)
    for requests in (4, 40):
        right = 0.0001 * requests / (0.010 + 0.0004 * requests)
        assert costs.price(requests) == pytest.approx(right, rel=0.02)


@pytest.mark.parametrize("without", [False, True])
def test_the_price_outlasts_a_change_of_what_steps_have(without: bool) -> None:
    """Many steps without drafts do not make them free, and many with the same drafts do not move their price."""
    costs = StepCosts()
    for requests, drafts in ((8, 0), (6, 2), (8, 5), (8, 0), (7, 9)) * 20:
        decoded(costs, requests, drafts)
    for _ in range(2000):
        decoded(costs, 8, 0 if without else 4)
    assert costs.price(8) == pytest.approx(0.0008 / 0.0132, rel=0.05)


def test_the_first_draft_of_a_step_has_a_cost_of_its_own() -> None:
    costs = StepCosts()
    assert costs.first_draft(8) == 0.0
    for requests, drafts in ((8, 0), (6, 2), (8, 5), (5, 0), (7, 9)) * 40:
        costs.on_step(requests, drafts, 0.010 + 0.0004 * requests + 0.0001 * drafts + 0.002 * (drafts > 0))
    assert costs.price(8) == pytest.approx(0.0008 / 0.0132, rel=0.02)
    assert costs.first_draft(8) == pytest.approx(0.016 / 0.0132, rel=0.02)


def test_what_could_be_either_cost_is_the_price() -> None:
    costs = StepCosts()
    for drafts in (0, 4) * 40:
        decoded(costs, 8, drafts)
    assert costs.price(8) == pytest.approx(0.0008 / 0.0132, rel=0.05)
    assert costs.first_draft(8) < 0.02


def test_a_step_without_drafts_is_measured_again() -> None:
    """Contexts grow while all steps have drafts: they must not seem to be what drafts cost."""
    costs = StepCosts()
    for drafts in (3, 6, 0) * 20:
        decoded(costs, 8, drafts)
    longer = 0.004
    for number in range(COMPARED_AFTER):
        assert not costs.should_compare(8)
        costs.on_step(8, drafts := 2 + number % 3, 0.0132 + longer + 0.0001 * drafts)
    assert costs.first_draft(8) > 1.0
    assert costs.should_compare(8)
    costs.on_step(8, 0, 0.0132 + longer)
    assert not costs.should_compare(8)
    assert costs.first_draft(8) < 0.25


def test_a_step_without_drafts_is_measured_soon_when_many_more_requests_run() -> None:
    """What 64 requests with drafts take beyond 8 without is not all the drafts'."""
    costs = StepCosts()
    for drafts in (3, 0) * 20:
        decoded(costs, 8, drafts)
    for _ in range(10):
        assert not costs.should_compare(9)
        decoded(costs, 9, 2)
    assert costs.should_compare(64)
    decoded(costs, 64, 0)
    assert not costs.should_compare(64)


def test_a_slow_step_does_not_end_drafts_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CacheManager(CacheConfig(device_chunks=8, host_chunks=0), FREE)
    drafting = Drafting(SchedulerConfig(64, max_drafts=8), cache, 64)
    monkeypatch.setattr(
        drafting, "_propose", lambda requests, budget, price: [_Proposal(Mock(), 0, [1], 0, 0.5)]
    )
    monkeypatch.setattr(drafting, "_reserve", lambda proposals, now: dict.fromkeys(range(len(proposals))))
    eight = [Mock()] * 8

    def steps(count: int) -> int:
        """Return how many of the steps had drafts."""
        found = 0
        for _ in range(count):
            drafts = len(drafting.plan(eight, 8, 0.0, lambda: False))
            found += drafts > 0
            decoded(drafting.costs, 8, drafts)
        return found

    for _ in range(50):
        decoded(drafting.costs, 8, 0)
    assert steps(50) == 50
    drafting.costs.on_step(8, 1, 60.0)
    assert steps(50) == 50, "the machine held up one step"
    for _ in range(3):
        drafting.costs.on_step(8, 1, 60.0)
    assert steps(COMPARED_AFTER) == 0
    steps(3 * COMPARED_AFTER)
    assert steps(50) >= 49  # all but one that is compared


def test_a_slow_first_step_with_drafts_is_not_their_price() -> None:
    """It may compile a kernel, or capture a graph. What all others take is learnt from the second one on."""
    costs = StepCosts()
    for _ in range(50):
        decoded(costs, 8, 0)
    costs.on_step(8, 4, 1.0)
    assert costs.price(8) == costs.first_draft(8) == 0.0
    for _ in range(2):
        costs.on_step(8, 64, 0.132)
    assert costs.price(8) == pytest.approx((0.132 - 0.0132) / 64 * 8 / 0.0132, rel=0.1)


@pytest.mark.parametrize(
    ("gains", "waits", "taken"),
    [
        ((0.5, 0.5), False, False),
        ((0.5, 0.9), False, True),
        ((0.5, 0.9), True, False),
        ((3.5, 0.2), True, True),
    ],
)
def test_drafts_must_gain_what_they_cost(gains: tuple[float, ...], waits: bool, taken: bool) -> None:
    """The first one of a step costs more than the others, and a wait of the device costs all requests time."""
    drafting = Drafting(
        SchedulerConfig(64, max_drafts=8), CacheManager(CacheConfig(device_chunks=8, host_chunks=0), FREE), 64
    )
    for drafts in (0, 2, 5) * 40:  # the first draft costs 1.2 tokens
        drafting.costs.on_step(8, drafts, 0.010 + 0.0015 * (drafts > 0))
    drafting.sync_share = 0.3
    proposals = [_Proposal(Mock(), 0, [1], 0, gain) for gain in gains]
    assert drafting._is_worthwhile(proposals, 8, waits=waits) == taken


def test_what_a_wait_loses_is_learnt_and_tried_again() -> None:
    costs = StepCosts()
    assert costs.lost_share(0.1) == pytest.approx(0.1)
    for drafts in (3, 0) * 50:  # also a wait that brought no drafts
        decoded(costs, 8, drafts, idle=0.3 * (0.0132 + 0.0001 * drafts))
        decoded(costs, 8, 0)
    assert costs.lost_share(0.1) == pytest.approx(0.3, abs=0.01)
    for _ in range(50):
        decoded(costs, 8, 0)
    assert costs.lost_share(0.1) > 0.25
    for _ in range(6000):
        decoded(costs, 8, 0)
    assert costs.lost_share(0.1) < 0.15
    decoded(costs, 8, 3, idle=60.0)  # something else held the host up
    assert costs.lost_share(0.1) < 1.0
