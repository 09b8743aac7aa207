"""Client certificates as a way to log in, with real ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import grpc
import pytest
from grpc import aio

from pensieve import rpc_status
from pensieve.server.operations.metrics import Metrics
from pensieve.server.rpc.auth import FORWARDED_NAME_KEY
from pensieve.server.rpc.grpc_server import tls_credentials
from pensieve.server.rpc.interceptor import AccessControl
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc
from support.service.certificates import authority, signed
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
