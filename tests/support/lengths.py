"""How long the tests take: how much they draw at random, and which of them come first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
LONG = os.environ.get("PENSIEVE_LONG_TESTS") == "1"


def at_length(short: int, long: int) -> int:
    """``short``, or ``long`` where PENSIEVE_LONG_TESTS=1 asks for it."""
    return long if LONG else short


def some(cases: Sequence[T], count: int) -> Sequence[T]:
    """``count`` of the cases, evenly spread; all where PENSIEVE_LONG_TESTS=1 asks for them."""
    return cases if LONG else [cases[index * len(cases) // count] for index in range(count)]


SLOWEST = (
    "tests/exactness/test_families.py",
    "tests/e2e/test_three_systems.py",
    "tests/speech/test_grammar.py",
    "tests/http/test_form_clients.py",
    "tests/e2e/test_smollm2.py",
    "tests/e2e/test_demo.py",
    "tests/robustness/test_under_faults.py",
    "tests/e2e/test_readme.py",
    "tests/e2e/test_real_server.py",
    "tests/client/test_restart.py",
    "tests/replicas/test_restarts.py",
    "tests/e2e/test_examples.py",
    "tests/engine/test_random_schedules.py",
    "tests/simulate/test_fidelity.py",
    "tests/server_infra/test_app.py",
    "tests/engine/test_groups.py",
    "tests/faults/test_server_killed.py",
    "tests/simulate/test_validation.py",
    "tests/simulate/test_command.py",
    "tests/bench/test_evaluate_jobs.py",
    "tests/simulate/test_simulations.py",
    "tests/simulate/test_sharing.py",
    "tests/ops/test_decoder_ops.py",
    "tests/ops/test_prefixes.py",
    "tests/ops/test_triton_attention.py",
    "tests/simulate/test_turn_sharing.py",
    "tests/replay_presentation/test_compare.py",
    "tests/test_distribution.py",
    "tests/page/test_page_browser.py",
    "tests/engine/test_beams.py",
    "tests/service/test_structured_answers.py",
    "tests/engine/test_structured.py",
    "tests/exactness/test_structured.py",
    "tests/bench/test_evaluate_plan.py",
    "tests/operations/test_traces.py",
    "tests/operations/test_dashboard_and_alerts.py",
    "tests/server_infra/test_process_link.py",
    "tests/http/test_serve_http.py",
    "tests/engine/test_mutants.py",
    "tests/replay/test_crew.py",
    "tests/exactness/test_groups.py",
    "tests/replay_presentation/test_report_page.py",
)
"""The files that take longest, longest first: started early, none of them keeps one worker busy at the end alone."""


def turn_of(file: str) -> int:
    """When the tests of a file, relative to the root, are to start: lower is sooner."""
    return SLOWEST.index(file) if file in SLOWEST else len(SLOWEST)
