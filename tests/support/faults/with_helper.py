"""The fake engine with a process of its own beside it, as ranks and compilers are. It ends when its engine has."""

from __future__ import annotations

import subprocess

from pensieve.config import EngineOptions
from support.engine import fake_engine

BUILDER = "support.faults.with_helper:build"
_helpers: list[subprocess.Popen[bytes]] = []


def build(engine_options: EngineOptions) -> fake_engine.FakeEngine:
    """Only the engine holds the pipe from which ``cat`` reads."""
    _helpers.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))
    return fake_engine.build(engine_options)
