"""What every test gets: no network, one thread per process, and honest skips."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
from collections.abc import Generator

import hypothesis
import pytest

from support.lengths import turn_of
from support.smollm2 import SMOLLM2_FILE

# Before torch and transformers are imported anywhere. Several test processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# No test speaks to another machine. A client of HTTP that reads the certificates of all authorities when it is made
# takes longer over it than over its requests.
os.environ.pop("SSL_CERT_FILE", None)
os.environ.update(HF_HUB_OFFLINE="1", SSL_CERT_DIR=os.devnull)
# A worker holds a million objects: collected tests, syntax trees, torch. Looking for garbage as often as Python does by
# default takes a quarter of its time.
gc.set_threshold(20_000, 20, 50)
# Modules must be collected at the exit: the bindings of some report what outlives them. Not before: pytest ends with
# two full runs of the collector, 1.3 s over what ``pytest_collection_finish`` hides from them.
atexit.register(gc.unfreeze)
# A shell that starts the tests in the background has them, and all that they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every run, so that a red test is red again; `explore` looks for new ones.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest files first; skip what this machine cannot run, a missing program only if said to be missing."""
    items.sort(key=lambda item: turn_of(item.nodeid.split("::")[0]))
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(
                    pytest.mark.skip(reason="needs a CUDA device (`make test-gpu` on a machine with one)")
                )
    programs = {"redis-server": "redis", "chromium": "chromium", "haproxy": "haproxy", "promtool": "promtool"}
    if os.environ.get("PENSIEVE_TEST_WITHOUT_SMOLLM2") == "1" and not SMOLLM2_FILE.is_file():
        for item in items:
            if item.get_closest_marker("smollm2"):
                item.add_marker(pytest.mark.skip(reason="no SmolLM2, and PENSIEVE_TEST_WITHOUT_SMOLLM2=1"))
    for program, marker in programs.items():
        variable = f"PENSIEVE_TEST_WITHOUT_{marker.upper()}"
        if os.environ.get(variable) == "1" and shutil.which(program) is None:
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=f"no {program}, and {variable}=1"))


def pytest_collection_finish() -> None:
    """Hide what collecting has made from the garbage collector: each full run of it takes half a second less."""
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a failure without collecting garbage.

    pytest parses the failing source. A task that is collected meanwhile may log a traceback, which parses as well, and
    before Python 3.11.10 that ends the run with "AST constructor recursion depth mismatch" in place of the report.
    """
    if call.excinfo is None:
        return (yield)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
