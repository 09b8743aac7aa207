"""A server whose working folder is gone, and one that was started without files that a process usually has."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from pensieve import Client
from support.processes import children, until
from support.service.server_process import WITHOUT_UVLOOP, launched, model_folder

PENSIEVE = Path(sys.executable).parent / "pensieve"


@pytest.mark.fault(27)
def test_an_engine_is_started_again_without_the_working_folder(tmp_path: Path) -> None:
    """A release that was replaced, a temporary folder that was swept: Python itself does not start there."""
    model_folder(tmp_path / "model")
    (tmp_path / "here").mkdir()
    with launched(tmp_path, cwd=tmp_path / "here", model="../model", http="127.0.0.1:0") as server:
        (tmp_path / "here").rmdir()
        with Client(server.grpc, retry_for=20) as client:
            session = client.create_session()
            before = session.send("hello", max_output_tokens=3)
            os.kill(server.engine_pid, signal.SIGKILL)
            after = session.send("again", max_output_tokens=3)
        assert (before.usage.output_tokens, after.usage.output_tokens) == (3, 3)
        server.terminate()
        assert server.finish() == (0, "")


def test_a_start_in_a_folder_that_is_gone_is_told_in_one_line(tmp_path: Path) -> None:
    command = ["bash", "-c", 'mkdir gone; cd gone; rmdir ../gone; exec "$0" serve', str(PENSIEVE)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert (
        result.stderr.splitlines()[-1]
        == "pensieve serve: the working folder no longer exists: change to another one"
    )


def test_closed_standard_files_do_not_become_others(tmp_path: Path) -> None:
    """What is written to stderr would go into a connection, or what else has its number."""
    script = 'exec "$0" serve --store memory: --listen 127.0.0.1:0 --admin 127.0.0.1:0 <&- 2>&-'
    process = subprocess.Popen(
        ["bash", "-c", script, str(PENSIEVE)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    files = Path(f"/proc/{process.pid}/fd")
    try:
        until(lambda: len(os.listdir(files)) > 8, "it opens nothing")
        assert {(files / number).readlink() for number in ("0", "2")} == {Path(os.devnull)}
    finally:
        process.kill()
        process.communicate()


def test_a_stdout_that_takes_nothing_ends_no_server(tmp_path: Path) -> None:
    with launched(tmp_path, ready=False) as server:
        assert server.process.stdout is not None
        server.process.stdout.close()
        server.process.stdout = None
        until(lambda: "stdout does not take the ready line" in server.stderr, "it says nothing of stdout")
        server.terminate()
        assert server.process.wait(40) == 0
        assert "Traceback" not in server.stderr


@pytest.mark.fault(34)
def test_connections_that_find_no_files_are_logged_now_and_then(tmp_path: Path) -> None:
    """asyncio tells of each place in its backlog, with a traceback, every second."""
    with launched(tmp_path, http="127.0.0.1:0", begin=WITHOUT_UVLOOP) as server:
        _, door = children(server.process.pid)
        for pid, address in ((server.process.pid, server.admin), (door, server.http)):
            _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            most = len(os.listdir(f"/proc/{pid}/fd")) + 8
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, hard))
            host, port = address.split(":")
            crowd = [socket.create_connection((host, int(port))) for _ in range(40)]
            until(
                lambda: "no more files" in server.stderr or "Too many" in server.stderr,
                "it says nothing of files",
            )
            time.sleep(1.2)  # asyncio tries again every second
            for one in crowd:
                one.close()
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
        for url in (f"http://{server.admin}/readyz", f"http://{server.http}/ready"):
            urllib.request.urlopen(url, timeout=20).close()
        assert server.stderr.count("no file descriptor is free") == 2
        server.terminate()
        assert server.finish() == (0, "")
        assert "Traceback" not in server.stderr
