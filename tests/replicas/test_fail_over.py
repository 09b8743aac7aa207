"""Redis fails over while clients talk to two servers through the proxy: no turn fails and none is lost.

``python tests/replicas/failover.py`` plays this, and restarts of the servers, as often as you like and shows figures.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.replicas.failover import stage

pytestmark = [pytest.mark.redis, pytest.mark.haproxy, pytest.mark.timeout(300)]


@pytest.mark.fault(48)
async def test_a_fail_over_under_load_fails_no_turn(tmp_path: Path) -> None:
    """The primary stands still, as if cut off from everybody, and comes back as one that knows nothing of all that."""
    async with stage(tmp_path, clients=2) as playing, playing.measuring("SIGSTOP") as measured:
        await playing.fail_over(measured, hung=True)
    assert playing.crowd.errors == []
    assert measured.turns
