"""promtool and Prometheus, run on the files of ``deploy/prometheus``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from support.sources import ROOT
from support.store.redis_server import free_port

FOLDER = ROOT / "deploy" / "prometheus"
START_LIMIT_S = 30.0


def require(program: str) -> str:
    """Path of a binary of the package ``prometheus``. Fails the test without it, unless told that it is missing."""
    found = shutil.which(program)
    if found is not None:
        return found
    problem = f"{program} is not installed: apt-get install prometheus"
    if os.environ.get("PENSIEVE_TEST_WITHOUT_PROMTOOL") == "1":
        pytest.skip(f"{problem} (skipped: PENSIEVE_TEST_WITHOUT_PROMTOOL=1)")
    pytest.fail(f"{problem}, or set PENSIEVE_TEST_WITHOUT_PROMTOOL=1 to skip the tests that need it")


def promtool(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run it with ``text`` as its input."""
    command = [require("promtool"), *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


class PrometheusServer:
    """A running one."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, path: str, **query: str) -> Any:
        """``data`` of an answer of its API. Raises OSError (also for a query that it does not understand)."""
        with urlopen(f"http://{self._address}/api/v1/{path}?{urlencode(query)}", timeout=10) as answer:
            return json.loads(answer.read())["data"]

    def up(self) -> bool:
        try:
            with urlopen(f"http://{self._address}/-/ready", timeout=5):
                return True
        except OSError:
            return False


@contextmanager
def prometheus(folder: Path, servers: Sequence[str], scrape_interval: str) -> Iterator[PrometheusServer]:
    """Prometheus with the deployed configuration, but for the servers (HOST:PORT of admin ports) and the interval."""
    binary = require("prometheus")
    shutil.copytree(FOLDER, folder)
    configuration = folder / "prometheus.yml"
    text = configuration.read_text()
    assert "  scrape_interval: 15s\n" in text
    configuration.write_text(text.replace("scrape_interval: 15s", f"scrape_interval: {scrape_interval}"))
    (folder / "targets" / "servers.yml").write_text(json.dumps([{"targets": list(servers)}]))
    (folder / "targets" / "gateways.yml").write_text("[]")
    address = f"127.0.0.1:{free_port()}"
    command = [binary, f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address={address}", "--log.level=warn"]
    with (folder / "log.txt").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        server = PrometheusServer(address)
        try:
            until = time.monotonic() + START_LIMIT_S
            while not server.up():
                assert process.poll() is None and time.monotonic() < until, (folder / "log.txt").read_text()
                time.sleep(0.05)
            yield server
        finally:
            process.terminate()
