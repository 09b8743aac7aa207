"""Client certificates as a way to log in, with real ones."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest
from click.testing import CliRunner
from grpc import aio

from pensieve import rpc_status
from pensieve.cli.sessions import sessions
from pensieve.client.identity import identity_credentials
from pensieve.server.operations.metrics import Metrics
from pensieve.server.rpc.auth import FORWARDED_NAME_KEY
from pensieve.server.rpc.grpc_server import tls_credentials
from pensieve.server.rpc.interceptor import AccessControl
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc
from support.http.gateway import gateway
from support.service.certificates import authority, openssl, signed
from support.service.service_rig import serving

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
KEYS = """
[[certificate]]
name = "spiffe://acme/web"
tenant = "acme"

[[certificate]]
name = "Plain Name"
tenant = "plain"
scopes = ["sessions.read"]

[[certificate]]
name = "old.example"
tenant = "acme"
expires = 2020-01-01T00:00:00Z
"""


async def test_a_certificate_says_who_calls(tmp_path: Path) -> None:
    ours, strange = authority(tmp_path, "ours"), authority(tmp_path, "strange")
    server = signed(tmp_path, ours, "server", "/CN=server", "IP:127.0.0.1")
    clients = {
        "web": signed(tmp_path, ours, "web", "/CN=ignored", "URI:spiffe://acme/web,DNS:web.acme"),
        "plain": signed(tmp_path, ours, "plain", "/CN=Plain Name"),
        # Its common name is in the file, its alternative name is not: the common name does not count then.
        "hidden": signed(tmp_path, ours, "hidden", "/CN=Plain Name", "DNS:other.example"),
        "old": signed(tmp_path, ours, "old", "/CN=x", "DNS:old.example"),
        "forged": signed(tmp_path, strange, "forged", "/CN=x", "URI:spiffe://acme/web"),
    }
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    door = AccessControl(keys, Metrics())
    async with serving(door=door, credentials=tls_credentials(*server, ours)) as rig:

        async def call(client: str, *, header: str = "", told: str = "") -> str:
            cert, key = clients.get(client, (None, None))
            credentials = grpc.ssl_channel_credentials(
                ours.read_bytes(), key and key.read_bytes(), cert and cert.read_bytes()
            )
            options = (("grpc.enable_retries", 0),)
            async with aio.secure_channel(rig.target, credentials, options) as channel:
                api = pensieve_pb2_grpc.ConversationServiceStub(channel)
                metadata: list[tuple[str, str | bytes]] = [("authorization", header)] if header else []
                if told:
                    metadata.append((FORWARDED_NAME_KEY, told.encode()))
                try:
                    name = f"sessions/{client}-session"
                    await api.CreateSession(
                        pb.CreateSessionRequest(session_id=name.removeprefix("sessions/")),
                        metadata=metadata,
                        timeout=20,
                    )
                except aio.AioRpcError as error:
                    return rpc_status.from_rpc_error(error).reason
                return ""

        assert await call("web") == ""
        assert (await rig.store.list_sessions("acme", limit=9)).rows
        assert await call("plain") == "SCOPE_MISSING"
        assert await call("hidden") == "CREDENTIAL_MISSING"
        assert await call("hidden", told="spiffe://acme/web") == "CREDENTIAL_MISSING", (
            "the HTTP door alone is believed"
        )
        assert await call("old") == "CREDENTIAL_EXPIRED"
        assert await call("web", header="Bearer ck_a_b") == "CREDENTIAL_INVALID", (
            "a header is judged by itself"
        )
        assert await call("forged") == "TRANSPORT", "the handshake fails"
        assert await call("none") == "TRANSPORT", "the handshake fails"
        keys.write_text(KEYS.replace("spiffe://acme/web", "spiffe://acme/other"))
        door.reload_keys(always=True)
        assert await call("web") == "CREDENTIAL_MISSING"


async def test_without_a_client_authority_no_certificate_is_asked_for(tmp_path: Path) -> None:
    ours = authority(tmp_path, "ours")
    server = signed(tmp_path, ours, "server", "/CN=server", "IP:127.0.0.1")
    client = grpc.ssl_channel_credentials(ours.read_bytes())
    async with (
        serving(credentials=tls_credentials(*server)) as rig,
        aio.secure_channel(rig.target, client) as channel,
    ):
        api = pensieve_pb2_grpc.ConversationServiceStub(channel)
        assert (await api.GetServerInfo(pb.GetServerInfoRequest(), timeout=20)).model == "tiny"


def combined(folder: Path, cert: Path, key: Path) -> Path:
    """One file of a certificate and a key."""
    path = folder / f"{cert.stem}-{key.stem}.pem"
    path.write_bytes(cert.read_bytes() + key.read_bytes())
    return path


async def test_commands_show_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = authority(tmp_path, "ours")
    server = signed(tmp_path, ours, "server", "/CN=server", "IP:127.0.0.1")
    web = combined(tmp_path, *signed(tmp_path, ours, "web", "/CN=x", "URI:spiffe://acme/web"))
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", str(ours))

    def listed(target: str, *more: str) -> subprocess.CompletedProcess[str]:
        """gRPC reads the roots once in a process."""
        command = [sys.executable, "-P", "-m", "pensieve", "sessions", "list", "--target", target, *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    def through_gateways(target: str) -> None:
        with gateway(target, "--tls-identity", str(web)) as url:
            assert httpx.get(f"{url}/v1/models").status_code == 200
            elsewhere = httpx.get(f"{url}/v1/models", headers={"host": "rebound.example"})
            assert elsewhere.json()["error"]["code"] == "foreign_host"
            page = httpx.post(f"{url}/v1/responses", headers={"origin": "http://evil.example"}, json={})
            assert page.json()["error"]["code"] == "foreign_origin"
            wrong = httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer ck_a_b"})
            assert wrong.status_code == 401, "a key counts before the certificate"
        files = ("--tls-cert", str(server[0]), "--tls-key", str(server[1]))
        with gateway(target, "--tls-identity", str(web), "--listen", "0.0.0.0:0", *files) as url:
            port = url.rpartition(":")[2]
            trusted = ssl.create_default_context(cafile=str(ours))
            refused = httpx.get(f"https://127.0.0.1:{port}/v1/models", verify=trusted)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "keys_required")

    async with serving(
        door=AccessControl(keys, Metrics()), credentials=tls_credentials(*server, ours)
    ) as rig:
        done = await asyncio.to_thread(listed, rig.target, "--tls-identity", str(web))
        assert (done.returncode, done.stderr) == (0, f"no sessions at {rig.target}\n")
        done = await asyncio.to_thread(listed, rig.target, "--tls")
        assert done.returncode == 1 and "--tls-identity if it has --tls-client-ca" in done.stderr
        await asyncio.to_thread(through_gateways, rig.target)


def test_a_file_that_is_no_identity(tmp_path: Path) -> None:
    ours = authority(tmp_path, "ours")
    one, other = signed(tmp_path, ours, "one", "/CN=one"), signed(tmp_path, ours, "other", "/CN=other")
    locked = tmp_path / "locked.key"
    openssl("ec", "-aes256", "-passout", "pass:x", "-in", one[1], "-out", locked)
    for path, problem in (
        (one[0], "PEM lib"),
        (one[1], "PEM lib"),
        (combined(tmp_path, one[0], other[1]), "key values mismatch"),
        (combined(tmp_path, one[0], locked), "the private key is encrypted"),
    ):
        said = CliRunner().invoke(sessions, ["list", "--tls-identity", str(path)])
        assert (
            said.exit_code == 2 and "is not a PEM file with a certificate and its private key" in said.output
        )
        assert problem in said.output


def test_connections_are_shared_until_the_file_changes(tmp_path: Path) -> None:
    """gRPC shares a connection only between channels with the same object."""
    ours = authority(tmp_path, "ours")
    path = combined(tmp_path, *signed(tmp_path, ours, "one", "/CN=one"))
    first = identity_credentials(path)
    assert identity_credentials(path) is first
    stamp = path.stat().st_mtime_ns + 1
    os.utime(path, ns=(stamp, stamp))
    assert identity_credentials(path) is not first


def test_a_file_that_is_being_renewed_costs_no_new_connection(tmp_path: Path) -> None:
    """The HTTP door makes a client for each new caller."""
    ours = authority(tmp_path, "ours")
    path = combined(tmp_path, *signed(tmp_path, ours, "one", "/CN=one"))
    first = identity_credentials(path)
    whole = combined(tmp_path, *signed(tmp_path, ours, "two", "/CN=two")).read_bytes()
    path.write_bytes(whole[:300])
    assert identity_credentials(path) is first
    path.unlink()
    assert identity_credentials(path) is first
    path.write_bytes(whole)
    assert identity_credentials(path) is not first
