"""Runs the Node client of ``tests/interop/node`` against any server."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tests" / "interop" / "node"


def missing_programs() -> list[str]:
    """What has to be installed first."""
    return [name for name in ("node", "npm") if shutil.which(name) is None]


def install_node_client() -> None:
    """Fetch its dependencies, exactly those of the lock file; nothing when they are there already."""
    installed = FOLDER / "node_modules" / ".package-lock.json"
    # Several test processes may ask for it at once.
    with (FOLDER / "package.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if installed.exists() and installed.stat().st_mtime >= (FOLDER / "package-lock.json").stat().st_mtime:
            return
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run(command, cwd=FOLDER, check=True, capture_output=True, timeout=300)


def run_node_client(target: str) -> dict[str, Any]:
    """Two streamed turns over gRPC from JavaScript; what the program saw. ``target`` is HOST:PORT."""
    return _run("client.js", target, str(ROOT / "proto"))


def run_openai_client(url: str, api_key: str) -> dict[str, Any]:
    """What OpenAI's client sees at the HTTP door."""
    return _run("openai.js", url, api_key)


def run_openai_example(url: str, api_key: str) -> str:
    """What the example of the documentation prints."""
    settings = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": api_key,
        "NODE_PATH": str(FOLDER / "node_modules"),
    }
    return _said(str(ROOT / "examples" / "openai_responses.js"), **settings)


def _run(program: str, *arguments: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(_said(program, *arguments))
    return result


def _said(program: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        ["node", program, *arguments],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "no_proxy": "127.0.0.1,localhost", **environment},  # grpc-js obeys http_proxy.
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
