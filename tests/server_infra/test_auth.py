"""Credentials, scopes, and that no method is without an entry in the table."""

from __future__ import annotations

import hashlib
import itertools
import os
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

from pensieve.errors import PermissionDenied, Unauthenticated
from pensieve.server.rpc.auth import (
    ADMIN,
    ALL_SCOPES,
    PUBLIC,
    READ,
    RELOAD_S,
    SCOPE_OF_METHOD,
    WRITE,
    Authenticator,
    load_keys,
)
from pensieve.v1 import pensieve_pb2

DESCRIPTOR: FileDescriptor = pensieve_pb2.DESCRIPTOR
METHODS = [
    f"/{service.full_name}/{method.name}"
    for service in DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
GET = "/pensieve.v1.ConversationService/GetSession"
SECRET = "s3cret-with-256-bits"


def entry(key_id: str, secret: str = SECRET, tenant: str = "acme", extra: str = "") -> str:
    digest = hashlib.sha256(secret.encode()).hexdigest()
    return f'[[key]]\nid = "{key_id}"\nsha256 = "{digest}"\ntenant = "{tenant}"\n{extra}\n'


def bearer(key_id: str, secret: str = SECRET) -> list[tuple[str, str | bytes]]:
    return [("x-session-route", "sessions/a"), ("authorization", f"Bearer ck_{key_id}_{secret}")]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(
        entry("reader", extra=f'scopes = ["{READ}"]')
        + entry("writer", extra=f'scopes = ["{READ}", "{WRITE}"]')
        + entry("root", tenant="ops", extra=f'scopes = ["{ADMIN}"]')
        + entry("old", extra="expires = 2020-01-01T00:00:00Z")
    )
    return path


@pytest.mark.fault(55)
def test_every_method_of_the_descriptor_has_a_scope_and_no_other() -> None:
    ours = {method for method in SCOPE_OF_METHOD if method.startswith("/pensieve.")}
    assert ours == set(METHODS)
    assert all(SCOPE_OF_METHOD[method] in ALL_SCOPES for method in METHODS)
    public = {method for method, scope in SCOPE_OF_METHOD.items() if scope == PUBLIC}
    assert all(method.startswith(("/grpc.health.", "/grpc.reflection.")) for method in public)


@pytest.mark.fault(55)
@pytest.mark.parametrize(("method", "key"), [*itertools.product(METHODS, ["reader", "writer", "root"])])
def test_each_method_takes_exactly_its_scope(keys: Path, method: str, key: str) -> None:
    auth = Authenticator(keys)
    granted = {"reader": {READ}, "writer": {READ, WRITE}, "root": {ADMIN}}[key]
    if SCOPE_OF_METHOD[method] in granted:
        identity = auth.check(method, bearer(key))
        assert identity.tenant == ("ops" if key == "root" else "acme")
        assert identity.key_id == key
    else:
        with pytest.raises(PermissionDenied) as caught:
            auth.check(method, bearer(key))
        assert caught.value.reason == "SCOPE_MISSING"


@pytest.mark.fault(55)
@pytest.mark.parametrize("method", METHODS)
def test_each_method_refuses_who_shows_nothing_or_something_wrong(keys: Path, method: str) -> None:
    failures: list[str] = []
    auth = Authenticator(keys, on_failure=lambda: failures.append(method))
    with pytest.raises(Unauthenticated, match="CREDENTIAL_MISSING"):
        auth.check(method, [])
    with pytest.raises(Unauthenticated, match="CREDENTIAL_EXPIRED"):
        auth.check(method, bearer("old"))
    refusals = set()
    for wrong in (bearer("writer", "guess"), bearer("nobody"), [("authorization", "Basic abc")]):
        with pytest.raises(Unauthenticated, match="CREDENTIAL_INVALID") as caught:
            auth.check(method, wrong)
        refusals.add(str(caught.value))
    assert len(refusals) == 1, "a wrong secret and an unknown id must look alike"
    assert len(failures) == 5


@pytest.mark.parametrize("with_file", [True, False])
def test_an_unknown_method_is_refused_to_everybody(keys: Path, with_file: bool) -> None:
    auth = Authenticator(keys if with_file else None)
    with pytest.raises(PermissionDenied):
        auth.check("/pensieve.v1.ConversationService/DropTables", bearer("root"))


def test_health_is_open(keys: Path) -> None:
    assert Authenticator(keys).check("/grpc.health.v1.Health/Check", []).scopes == frozenset()


def test_without_a_file_everybody_is_the_default_tenant() -> None:
    identity = Authenticator(None).check(GET, bearer("whatever"))
    assert identity.tenant == "default" and identity.scopes == ALL_SCOPES


def test_a_key_is_revoked_and_rotated_without_a_restart(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    auth = Authenticator(keys, monotonic=lambda: now)
    auth.check(GET, bearer("writer"))
    keys.write_text(entry("next", "new-secret"))
    os.utime(keys, ns=(1, 1))
    now = RELOAD_S + 1
    assert auth.check(GET, bearer("next", "new-secret")).tenant == "acme"
    with pytest.raises(Unauthenticated):
        auth.check(GET, bearer("writer"))
    keys.write_text("not toml at all [")
    now = 3 * RELOAD_S
    assert auth.check(GET, bearer("next", "new-secret")).tenant == "acme"
    assert "keys in force stay" in caplog.text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no"),
        ("key = 3", "Expected"),
        (entry("a") + entry("a"), "occurs twice"),
        (entry("a_b"), "id must be"),
        (entry("a", extra='scopes = ["root"]'), "scopes must be"),
        (entry("a", extra="scopes = []"), "scopes must be"),
        (entry("a", tenant="x/y"), "tenant must be"),
        (entry("a", extra="secret = 'plain'"), "unknown field"),
        (entry("a", extra="expires = 2027-01-01T00:00:00"), "time zone"),
        ('[[key]]\nid = "a"\nsha256 = "ABC"\ntenant = "t"', "sha256 must be"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem):
        load_keys(path)
