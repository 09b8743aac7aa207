"""The door in front of a real server with the demo model, as processes of their own: what survives a power cut."""

from __future__ import annotations

import itertools
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from openai import APIStatusError, OpenAI

from pensieve.cli.gateway import gateway as gateway_command
from pensieve.config import DoorSettings
from pensieve.http import run
from pensieve.http.run import needs_no_key
from pensieve.server.operations.metrics import Metrics
from pensieve.server.rpc.interceptor import AccessControl
from pensieve.spawn import ServerProcess
from support.http.gateway import gateway
from support.http.http_rig import BearerTenant
from support.lengths import at_length
from support.service.certificates import authority, openssl
from support.service.service_rig import serving

pytestmark = pytest.mark.timeout(300)
LENGTH = at_length(8, 20)
"""Responses of a chain."""
O_TOKEN = "83"
"""The demo model's token of the letter o; two of them, as text, are another token."""
CHUNK = 16
"""Tokens: what is shared or kept is whole chunks."""


def server(folder: Path, port: int) -> ServerProcess:
    store = f"sqlite:///{folder / 'history.sqlite3'}"
    small = ("--chunk-tokens", str(CHUNK), "--threads", "1", "--context-limit", "2048")
    return ServerProcess("--model", "demo", "--store", store, *small, listen=f"127.0.0.1:{port}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_chain_survives_a_power_cut(tmp_path: Path) -> None:
    port = free_port()
    with gateway(f"127.0.0.1:{port}") as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)
        with client, server(tmp_path, port) as first:
            model = client.models.list().data[0].id

            def respond(text: str, previous: Any, **options: Any) -> Any:
                return client.responses.create(
                    model=model,
                    input=text,
                    previous_response_id=previous.id if previous else None,
                    max_output_tokens=12,
                    metadata={"said": text},
                    **options,
                )

            chain = [respond("My name is Ada.", None)]
            for number in range(1, LENGTH):
                chain.append(respond(f"I like the number {number}.", chain[-1]))
            for before, after in itertools.pairwise(chain):
                history = before.usage.input_tokens + before.usage.output_tokens
                assert after.usage.input_tokens_details.cached_tokens >= 0.8 * history
            said: list[Any] = [{"role": "user", "content": "Say o."}]
            odd = client.chat.completions.create(
                model=model, messages=said, logit_bias={O_TOKEN: 100}, max_tokens=40
            )
            assert odd.choices[0].message.content == 40 * "o"
            stream = respond("What is my name?", chain[-1], stream=True)
            cut = next(event.response for event in stream if event.type == "response.created")
            first.kill()
            with server(tmp_path, port), gateway(f"127.0.0.1:{port}") as newer:
                later = client.with_options(base_url=f"{newer}/v1")
                assert [later.responses.retrieve(one.id) for one in chain[-2:]] == chain[-2:]
                goes_on_with_its_tokens([later, client], said, odd)
                found = client.responses.retrieve(chain[-1].id)
                assert found.output_text == chain[-1].output_text
                assert found.usage == chain[-1].usage
                # What was under way is in the history as a whole or not at all, and the door says which.
                events = [
                    event for event in stream if event.type in ("response.completed", "response.failed")
                ]
                last = chain[-1]
                if events and events[-1].type == "response.completed":
                    last = client.responses.retrieve(cut.id)
                going_on = respond("What is my name?", last)
                assert going_on.usage.input_tokens > chain[-1].usage.input_tokens
                branch = respond("What is my name?", chain[0])
                assert branch.usage.input_tokens < 100


def goes_on_with_its_tokens(doors: list[OpenAI], said: list[Any], before: Any) -> None:
    """Doors that know nothing of the answer are led to its session, where its text is not made tokens again."""
    history = 0
    for door in doors:
        said += [{"role": "assistant", "content": before.choices[0].message.content}]
        said += [{"role": "user", "content": "Again."}]
        after = door.chat.completions.create(
            model=before.model, messages=said, logit_bias={O_TOKEN: 100}, max_tokens=40
        )
        assert after.session == before.session  # type: ignore[attr-defined]
        assert after.usage is not None and after.usage.prompt_tokens_details is not None
        # The first was not cached: the server has just started.
        assert after.usage.prompt_tokens_details.cached_tokens >= history // CHUNK * CHUNK
        assert after.usage.prompt_tokens > before.usage.total_tokens
        history, before = after.usage.total_tokens - 1, after


def test_a_service_that_is_away_is_a_503() -> None:
    with (
        gateway(f"127.0.0.1:{free_port()}", "--patience", "0.2") as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(APIStatusError) as caught,
    ):
        client.models.list()
    assert caught.value.status_code == 503


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").touch()
    arguments = [
        "--target",
        "127.0.0.1:1",
        "--listen",
        "127.0.0.1:0",
        "--tls-cert",
        str(tmp_path / "cert.pem"),
    ]
    said = CliRunner().invoke(gateway_command, arguments)
    assert said.exit_code == 2 and "--tls-cert and --tls-key go together" in said.output
    broken = CliRunner().invoke(gateway_command, [*arguments, "--tls-key", str(tmp_path / "cert.pem")])
    assert broken.exit_code == 2 and broken.stdout == "", "it is not ready"
    assert "are not a PEM certificate and its key" in broken.stderr


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
def test_an_encrypted_key_is_refused_in_one_line(tmp_path: Path) -> None:
    ours = authority(tmp_path, "ours")
    locked = tmp_path / "locked.key"
    openssl("ec", "-aes256", "-passout", "pass:x", "-in", ours.with_suffix(".key"), "-out", locked)
    files = ["--tls-cert", str(ours), "--tls-key", str(locked)]
    said = CliRunner().invoke(gateway_command, ["--target", "127.0.0.1:1", "--listen", "127.0.0.1:0", *files])
    assert said.exit_code == 2 and "the private key is encrypted" in said.stderr


def test_a_network_is_not_served_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off loopback a door takes TLS for its callers, and keys of the server behind it."""
    served: list[DoorSettings] = []
    keyless = True

    async def serve(settings: DoorSettings, *_: object) -> None:
        served.append(settings)

    async def asked(_: DoorSettings) -> bool:
        return keyless

    monkeypatch.setattr(run, "serve", serve)
    monkeypatch.setattr(run, "needs_no_key", asked)
    monkeypatch.setattr(run.TlsFiles, "context", lambda _: None)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.touch()
    key.touch()
    tls = ("--tls-cert", str(cert), "--tls-key", str(key))

    def opened(*more: str, listen: str = "0.0.0.0:0") -> Any:
        return CliRunner().invoke(gateway_command, ["--target", "127.0.0.1:1", "--listen", listen, *more])

    said = opened()
    assert said.exit_code == 2 and said.stdout == ""
    assert "--listen: 0.0.0.0:0 is not loopback; pass --tls-cert and --tls-key" in said.stderr
    said = opened(*tls)
    assert said.exit_code == 2 and said.stdout == ""
    assert "the server at 127.0.0.1:1 requires no API key; start it with --api-keys" in said.stderr
    assert served == []
    assert (
        opened("--insecure-i-know", "--heartbeat", "3s").exit_code == 0
        and opened(listen="127.0.0.1:0").exit_code == 0
    )
    keyless = False
    assert opened(*tls).exit_code == 0
    # The last one refuses calls, too, should the server be started without keys later.
    assert [one.wants_keys for one in served] == [False, False, True]
    assert [one.on_loopback for one in served] == [False, True, False]
    assert [one.heartbeat_s for one in served] == [3, 10, 10]


async def test_the_start_finds_out_whether_the_server_asks_for_keys(tmp_path: Path) -> None:
    async with serving(door=AccessControl(None, Metrics())) as open_to_all:
        assert await needs_no_key(DoorSettings(open_to_all.target))
    async with serving(authorizer=BearerTenant()) as keyed:
        assert not await needs_no_key(DoorSettings(keyed.target))
    assert not await needs_no_key(DoorSettings(f"unix:{tmp_path / 'nowhere'}"))
