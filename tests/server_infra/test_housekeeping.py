"""Expired sessions go without anybody asking; what systemd, or another manager by its protocol, is told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from pathlib import Path

import pytest

from pensieve.errors import Unavailable
from pensieve.machine import ServiceManager, service_manager
from pensieve.server.operations.housekeeping import ManagerNotifier, purge_forever
from pensieve.server.tasks import cancel_and_wait
from pensieve.store.memory_store import MemoryStore
from support.service.server_process import launched


class Flaky(MemoryStore):
    """Down at the first round, and broken at the second."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = 0
        self.third = asyncio.Event()

    async def purge_expired(self) -> int:
        self.rounds += 1
        if self.rounds == 1:
            raise Unavailable("down")
        if self.rounds == 2:
            raise RuntimeError("a bug")
        if self.rounds == 3:
            self.third.set()
        return 1


async def test_purging_goes_on_after_the_store_failed() -> None:
    store = Flaky()
    task = asyncio.create_task(purge_forever(store, interval_s=0.001))
    await asyncio.wait_for(store.third.wait(), 10)
    await cancel_and_wait(task)
    assert task.done()


LIMIT_S = 60.0


def test_a_server_says_that_it_serves_that_it_turns_and_that_it_drains(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(tmp_path / "notify"))
        told.settimeout(LIMIT_S)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        with launched(tmp_path / "server", environment=environment, ready=False) as server:
            assert told.recv(100) == b"READY=1"
            server.wait_ready()
            assert [told.recv(100) for _ in range(3)] == [b"WATCHDOG=1"] * 3
            server.terminate()
            while (last := told.recv(100)) == b"WATCHDOG=1":
                pass
            assert last == b"STOPPING=1"
            assert server.finish()[0] == 0


@pytest.mark.fault(34)
def test_the_manager_is_told_without_a_free_file(tmp_path: Path) -> None:
    """Else it would kill a server whose callers hold all descriptors."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(tmp_path / "notify"))
        told.settimeout(LIMIT_S)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}
        with launched(tmp_path / "server", environment=environment) as server:
            assert told.recv(100) == b"READY=1"
            pid = server.process.pid
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
            # More than the socket can hold from before.
            assert {told.recv(100) for _ in range(30)} == {b"WATCHDOG=1"}, server.stderr
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
            server.terminate()
            while (last := told.recv(100)) == b"WATCHDOG=1":
                pass
            assert last == b"STOPPING=1"
            assert server.finish()[0] == 0


def test_a_manager_that_does_not_listen_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(ManagerNotifier(ServiceManager(str(tmp_path / "none"), None))) as manager:
        manager.notify_ready()
    assert "the service manager could not be notified of READY=1" in caplog.text


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"NOTIFY_SOCKET": "vsock:2:1"}, None),
        ({"NOTIFY_SOCKET": "/run/notify"}, ServiceManager("/run/notify", None)),
        ({"NOTIFY_SOCKET": "@notify", "WATCHDOG_USEC": "60000000"}, ServiceManager("\0notify", 60.0)),
        (
            {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid())},
            ServiceManager("/n", 1.0),
        ),
        (
            {"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"},
            ServiceManager("/n", None),
        ),
    ],
)
def test_who_listens(
    environment: dict[str, str], found: ServiceManager | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert service_manager() == found
