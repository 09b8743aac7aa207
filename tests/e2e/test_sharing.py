"""Common beginnings through the whole product: forks, system prompts, another tenant, a server without any cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve import Client
from pensieve.client import Session
from pensieve.spawn import ServerProcess

pytestmark = pytest.mark.timeout(400)
CHUNK = 16
SIZES = (
    "--device-cache",
    "4096tokens",
    "--host-cache",
    "4096tokens",
    "--chunk-tokens",
    str(CHUNK),
    "--threads",
    "1",
)
PROMPT = "You remember what you are told, and answer in one short sentence. " * 6
LINES = ("My name is Ada.", "I live in Lisbon.", "My cat is called Mimi.")


def key_file(folder: Path) -> Path:
    """Keys of two tenants; the secrets are their names."""
    entries = [
        f'[[key]]\nid = "{name}"\nsha256 = "{hashlib.sha256(secret(name).encode()).hexdigest()}"\ntenant = "{name}"\n'
        'scopes = ["sessions.read", "sessions.write"]\n'
        for name in ("ada", "bob")
    ]
    path = folder / "keys.toml"
    path.write_text("\n".join(entries))
    return path


def secret(name: str) -> str:
    return f"{name}-secret-of-at-least-32-characters"


def key(name: str) -> str:
    return f"ck_{name}_{secret(name)}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    keys = str(key_file(tmp_path_factory.mktemp("keys")))
    with ServerProcess("--model", "demo", "--store", "memory:", "--api-keys", keys, *SIZES) as process:
        yield process
    assert process.stop() == 0


@pytest.fixture(scope="module")
def stateless() -> Iterator[ServerProcess]:
    with ServerProcess("--model", "demo", "--store", "memory:", "--stateless", *SIZES) as process:
        yield process


def talk(session: Session) -> list[tuple[int, ...]]:
    return [tuple(session.send(line, max_output_tokens=24, temperature=0.0).token_ids) for line in LINES]


def test_forks_and_prompts_are_found_and_answers_are_those_of_a_stateless_server(
    server: ServerProcess, stateless: ServerProcess
) -> None:
    with Client(server.target, api_key=key("ada")) as client, Client(stateless.target) as plain:
        first = client.create_session(system_prompt=PROMPT)
        answers = talk(first)
        reference = plain.create_session(system_prompt=PROMPT)
        assert talk(reference) == answers

        second = client.create_session(system_prompt=PROMPT)
        usage = second.send("What is my name?", max_output_tokens=8).usage
        assert usage.gpu_cached_tokens >= 64 and usage.recomputed_tokens == 0 and usage.reconciles

        branches = [first.fork() for _ in range(20)]
        before = held(first) + sum(map(held, branches))
        for branch in branches:
            usage = branch.send("What is my cat called?", max_output_tokens=8, temperature=0.0).usage
            assert usage.recomputed_tokens <= CHUNK and usage.gpu_cached_tokens > 100, usage
        assert before == held(first)  # a fork that has had no turn holds nothing of its own
        context = first.refresh().context_tokens
        expected = reference.fork().send("What is my cat called?", max_output_tokens=8, temperature=0.0)
        assert branches[0].last_turn is not None
        assert branches[0].last_turn.token_ids == expected.token_ids
        assert 20 * context > 4096  # so the 20 forks and their source could not all be held apart
        for branch in branches:
            usage = branch.send("Where do I live?", max_output_tokens=8, temperature=0.0).usage
            assert usage.recomputed_tokens <= CHUNK and usage.swapped_in_tokens == 0, usage
        first.delete()
        assert "Mimi" in branches[-1].send("What is my cat called?", max_output_tokens=24).text


@pytest.mark.fault(57)
def test_another_tenant_finds_nothing(server: ServerProcess) -> None:
    with (
        Client(server.target, api_key=key("ada")) as client,
        Client(server.target, api_key=key("bob")) as other,
    ):
        client.create_session(system_prompt=PROMPT).send(LINES[0], max_output_tokens=4)
        usage = other.create_session(system_prompt=PROMPT).send(LINES[0], max_output_tokens=4).usage
        assert usage.gpu_cached_tokens == usage.swapped_in_tokens == 0
        again = client.create_session(system_prompt=PROMPT, share_prefixes=False).send(
            LINES[0], max_output_tokens=4
        )
        assert again.usage.gpu_cached_tokens == again.usage.swapped_in_tokens == 0


def held(session: Session) -> int:
    residency = session.refresh(residency=True).residency
    return 0 if residency is None else residency.gpu_tokens + residency.host_tokens
