"""How long the tests take: how much they draw at random, and which of them come first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
LONG = os.environ.get("PENSIEVE_LONG_TESTS") == "1"
FIRST_SEED = int(os.environ.get("PENSIEVE_FIRST_SEED", "0"))


def at_length(short: T, long: T) -> T:
    """``short``, or ``long`` where PENSIEVE_LONG_TESTS=1 asks for it."""
    return long if LONG else short


def seeds(short: int, long: int) -> range:
    """``short`` seeds of random cases, or ``long``, from PENSIEVE_FIRST_SEED on: cases that no run has had yet."""
    return range(FIRST_SEED, FIRST_SEED + at_length(short, long))


def some(cases: Sequence[T], count: int) -> Sequence[T]:
    """``count`` of the cases, evenly spread; all where PENSIEVE_LONG_TESTS=1 asks for them."""
    return cases if LONG else [cases[index * len(cases) // count] for index in range(count)]


SLOWEST = (
    "tests/ops/test_interpreted.py",
    "tests/exactness/test_invariant.py",
    "tests/exactness/test_coded.py",
    "tests/e2e/test_answers_continue.py",
    "tests/speech/test_grammar.py",
    "tests/http/test_form_clients.py",
    "tests/e2e/test_demo.py",
    "tests/exactness/test_families.py",
    "tests/robustness/test_under_faults.py",
    "tests/e2e/test_three_systems.py",
    "tests/faults/test_server_killed.py",
    "tests/faults/test_compaction_killed.py",
    "tests/e2e/test_smollm2.py",
    "tests/exactness/test_hybrids.py",
    "tests/simulate/test_fidelity.py",
    "tests/service/test_structured_answers.py",
    "tests/engine/test_structured.py",
    "tests/exactness/test_structured.py",
    "tests/exactness/test_recomputed.py",
    "tests/http/test_serve_http.py",
    "tests/ranks/test_exactness.py",
    "tests/ranks/test_lives.py",
    "tests/bench/test_evaluate.py",
    "tests/engine/test_random_schedules.py",
    "tests/e2e/test_real_server.py",
    "tests/engine/test_hybrid_schedules.py",
    "tests/http/test_named_sessions.py",
    "tests/exactness/test_drafts.py",
    "tests/engine/test_drafts.py",
    "tests/engine/test_beams.py",
    "tests/simulate/test_calibrate.py",
    "tests/client/test_restart.py",
    "tests/server_infra/test_app.py",
    "tests/exactness/test_groups.py",
    "tests/simulate/test_command.py",
    "tests/e2e/test_examples.py",
    "tests/model/test_hub.py",
    "tests/replay_presentation/test_report_page.py",
    "tests/store/test_redis_sentinel.py",
    "tests/faults/test_two_servers.py",
    "tests/cli/test_complaints.py",
    "tests/bench/test_evaluate_jobs.py",
    "tests/replay_presentation/test_compare.py",
    "tests/chat/test_terminal.py",
    "tests/e2e/test_sharing.py",
    "tests/faults/test_engine_killed.py",
    "tests/simulate/test_simulations.py",
    "tests/faults/test_disconnects.py",
    "tests/e2e/test_elastic.py",
    "tests/replicas/test_fail_over.py",
    "tests/engine/test_groups.py",
    "tests/e2e/test_readme.py",
    "tests/replay/test_crew.py",
    "tests/tokenizer/test_real_templates.py",
    "tests/http/test_retries.py",
    "tests/http/test_messages.py",
    "tests/simulate/test_hybrids.py",
    "tests/replicas/test_restarts.py",
)
"""The files that take longest, longest first: started early, none of them keeps one worker busy at the end alone."""


def turn_of(file: str) -> int:
    """When the tests of a file, relative to the root, are to start: lower is sooner."""
    return SLOWEST.index(file) if file in SLOWEST else len(SLOWEST)
