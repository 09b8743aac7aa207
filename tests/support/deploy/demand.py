"""Tests of ``deploy/`` that want more programs than CI has: `make test-deploy`."""

from __future__ import annotations

import os
import shutil

import pytest

on_demand = pytest.mark.skipif(
    os.environ.get("PENSIEVE_DEPLOY_TESTS") != "1", reason="needs more programs: make test-deploy"
)


def program(name: str) -> str:
    """Path of one; it is there, or the test fails."""
    found = shutil.which(name)
    assert found is not None, (
        f"{name} is not installed: `make test-deploy` does it, but for Debian's packages"
    )
    return found
