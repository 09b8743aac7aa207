"""What ``docs/keys.md`` and the example of a key file say is done here as it is written there."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from pensieve.server.keys import load_keys
from pensieve.server.operations.metrics import Metrics
from pensieve.server.rpc.auth import Authenticator
from pensieve.server.rpc.grpc_server import tls_credentials
from pensieve.server.rpc.interceptor import AccessControl
from support.service.service_rig import serving
from support.sources import ROOT

PAGE = (ROOT / "docs/keys.md").read_text()
EXAMPLE = ROOT / "deploy/keys.example.toml"
OPENSSL = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="makes keys with openssl, as the page does"
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def played(block: str, folder: Path) -> str:
    """What the lines of a console print, those that start a server left out."""
    lines = re.findall(r"^\$ (?!pensieve)(.*)$", block, re.MULTILINE)
    return subprocess.run(
        ["bash", "-ec", "\n".join(lines)], cwd=folder, capture_output=True, text=True, timeout=60, check=True
    ).stdout


@OPENSSL
def test_a_key_that_is_made_so_logs_in(tmp_path: Path) -> None:
    digest, key = played(blocks("console")[0], tmp_path).split()
    (entry,) = (block for block in blocks("toml") if "sha256" in block)
    path = tmp_path / "keys.toml"
    path.write_text(re.sub(r'sha256 = "\w+"', f'sha256 = "{digest}"', entry))
    method = "/pensieve.v1.ConversationService/ListSessions"
    identity = Authenticator(path).check(method, [("authorization", f"Bearer {key}")])
    assert (identity.tenant, identity.key_id) == ("acme", "web1")


@OPENSSL
async def test_certificates_that_are_made_so_log_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played(blocks("console")[1], tmp_path)
    keys = tmp_path / "keys.toml"
    keys.write_text('[[certificate]]\nname = "spiffe://acme/batch"\ntenant = "acme"\n')
    credentials = tls_credentials(tmp_path / "server.crt", tmp_path / "server.key", tmp_path / "ca.crt")
    async with serving(door=AccessControl(keys, Metrics()), credentials=credentials) as rig:
        port = rig.target.rpartition(":")[2]
        code = blocks("python")[0].replace("localhost:50051", f"localhost:{port}")
        scope: dict[str, object] = {}

        def call() -> str:
            monkeypatch.chdir(tmp_path)
            exec(code, scope)
            with scope["client"] as client:  # type: ignore[attr-defined]
                return str(client.create_session(session_id="mine").name)

        assert await asyncio.to_thread(call) == "sessions/mine"


def test_the_example_waits_for_secrets_and_is_right_otherwise(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    line = text[: text.index('sha256 = "REPLACE"')].count("\n") + 1
    with pytest.raises(ValueError, match=rf"keys\.example\.toml:{line}: key 'web1': sha256 must be"):
        load_keys(EXAMPLE)
    path = tmp_path / "keys.toml"
    path.write_text(text.replace("REPLACE", "0" * 64))
    found = load_keys(path)
    assert set(found.keys) == {"web1", "web2", "operator"} and set(found.certificates) == {
        "spiffe://acme/batch"
    }
    assert found.keys["operator"].scopes == ("admin",) and found.tenants["acme"].weight == 2.0


def test_the_message_on_the_page_is_what_is_said(tmp_path: Path) -> None:
    (wrong,) = re.findall(r"^pensieve serve: \S+/keys\.toml:(\d+): (.*)$", PAGE, re.MULTILINE)
    (entry,) = (block for block in blocks("toml") if "sha256" in block)
    path = tmp_path / "keys.toml"
    path.write_text(re.sub(r'sha256 = "\w+"', 'sha256 = "x"', entry))
    with pytest.raises(ValueError) as caught:
        load_keys(path)
    assert str(caught.value) == f"{path}:{wrong[0]}: {wrong[1]}"


def test_the_page_names_every_field() -> None:
    rows = set(re.findall(r"^\|[^|]*\| `(\w+)` \|", PAGE, re.MULTILINE))
    written = tomllib.loads(EXAMPLE.read_text())
    assert rows >= {*written["key"][0], *written["certificate"][0]}
