"""Credentials, scopes, and that no method is without an entry in the table."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

from pensieve.errors import PermissionDenied, Unauthenticated
from pensieve.server.keys import ADMIN, ALL_SCOPES, READ, WRITE, load_keys
from pensieve.server.rpc.auth import ANY, PUBLIC, SCOPE_OF_METHOD, Authenticator, Peer
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
    assert all(method.startswith("/grpc.health.") for method in public)
    with_any_key = {method for method, scope in SCOPE_OF_METHOD.items() if scope == ANY}
    assert all(method.startswith("/grpc.reflection.") for method in with_any_key)


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


def test_a_key_file_as_windows_writes_it(keys: Path) -> None:
    before = load_keys(keys)
    keys.write_bytes(b"\xef\xbb\xbf" + keys.read_bytes().replace(b"\n", b"\r\n"))
    assert load_keys(keys) == before


def test_health_is_open(keys: Path) -> None:
    assert Authenticator(keys).check("/grpc.health.v1.Health/Check", []).scopes == frozenset()


def test_without_a_file_everybody_is_the_default_tenant() -> None:
    identity = Authenticator(None).check(GET, bearer("whatever"))
    assert identity.tenant == "default" and identity.scopes == ALL_SCOPES


def test_a_key_is_revoked_and_rotated_without_a_restart(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    auth = Authenticator(keys)
    identity = auth.check(GET, bearer("writer"))
    assert auth.revocation_error(identity) is None
    keys.write_text(entry("next", "new-secret"))
    os.utime(keys, ns=(1, 1))
    auth.reload()
    assert auth.check(GET, bearer("next", "new-secret")).tenant == "acme"
    with pytest.raises(Unauthenticated):
        auth.check(GET, bearer("writer"))
    problem = auth.revocation_error(identity)
    assert problem is not None and problem.reason == "CREDENTIAL_INVALID"
    keys.write_text("not toml at all [")
    for _ in range(3):
        auth.reload()
    assert auth.check(GET, bearer("next", "new-secret")).tenant == "acme"
    assert caplog.text.count("keys stay in force") == 1


def test_a_file_that_looks_unchanged_is_read_when_asked_for(keys: Path) -> None:
    auth = Authenticator(keys)
    status = keys.stat()
    keys.write_text(keys.read_text().replace('"writer"', '"wroter"'))
    os.utime(keys, ns=(status.st_atime_ns, status.st_mtime_ns))
    auth.reload()
    assert auth.check(GET, bearer("writer"))
    auth.reload(always=True)
    assert auth.check(GET, bearer("wroter"))


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (entry("k", "another-secret"), "CREDENTIAL_INVALID"),
        (entry("k", tenant="other"), "CREDENTIAL_INVALID"),
        (entry("k", extra=f'scopes = ["{READ}"]'), "CREDENTIAL_INVALID"),
        (entry("k", extra="expires = 2020-01-01T00:00:00Z"), "CREDENTIAL_EXPIRED"),
        (entry("k", extra=f'scopes = ["{READ}", "{WRITE}", "{ADMIN}"]'), ""),
    ],
)
def test_who_was_let_in_is_judged_again(tmp_path: Path, after: str, reason: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry("k"))
    auth = Authenticator(path)
    identity = auth.check(GET, bearer("k"))
    path.write_text(after)
    auth.reload(always=True)
    problem = auth.revocation_error(identity)
    assert (problem.reason if problem else "") == reason


def test_a_key_that_expires_while_it_is_used(tmp_path: Path) -> None:
    path, now = tmp_path / "keys.toml", 0.0
    path.write_text(entry("k", extra="expires = 1970-01-01T00:01:00Z"))
    auth = Authenticator(path, wall=lambda: now)
    identity = auth.check(GET, bearer("k"))
    now = 59.0
    assert auth.revocation_error(identity) is None
    now = 60.0
    problem = auth.revocation_error(identity)
    assert problem is not None and problem.reason == "CREDENTIAL_EXPIRED"


def test_limits_of_tenants(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        entry("a") + entry("b", tenant="b.c") + "[tenants.acme]\nweight = 2.0\nmax_sessions = 7\n"
        "[limits]\nmax_sessions = 3\nturns_at_once = 5\n"
    )
    auth = Authenticator(path)
    acme, other = auth.tenants.limits("acme"), auth.tenants.limits("b.c")
    assert (acme.weight, acme.max_sessions, acme.turns_at_once) == (2.0, 7, 5)
    assert (other.weight, other.max_sessions, other.turns_at_once) == (None, 3, 5)
    path.write_text(entry("a"))
    auth.reload(always=True)
    assert auth.tenants.limits("acme").max_sessions is None


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:5000", "127.0.0.1"),
        ("ipv6:%5B2001:db8::1%5D:5000", "2001:db8::1"),
        ("unix:/run/x", ""),
        ("unix:", ""),
    ],
)
def test_addresses_of_peers(peer: str, address: str) -> None:
    class Context:
        def peer(self) -> str:
            return peer

    assert Peer(Context()).address == address


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no"),
        (entry("a") + "[tenants.acmee]\nmax_sessions = 1\n", "tenant 'acmee' has limits and no key"),
        (entry("a") + "[tenants.acme]\nmax_session = 1\n", "unknown field"),
        (entry("a") + "[tenants.acme]\nmax_sessions = 0\n", ">= 1"),
        (entry("a") + "[limits]\nweight = 0\n", "> 0"),
        (entry("a") + "[limits]\ncache_share = 1.1\n", "<= 1"),
        (
            entry("a")
            + entry("b", tenant="b.c")
            + "[tenants.acme]\ncache_share = 0.6\n[limits]\ncache_share = 0.5\n",
            "cache_share add up to 1.1, more than 1",
        ),
        ('[[certificate]]\nname = ""\ntenant = "a"', "name must not be empty"),
        ('[[certificate]]\nname = "x"\ntenant = "a"\n' * 2, "occurs twice"),
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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("# ours\n" + entry("a") + "\n" + entry("b", extra="scopes = ['root']"), "scopes: key 'b': scopes must be"),
        (entry("a") + entry("b", tenant="x/y"), "tenant: key 'b': tenant must be"),
        (entry("a") + entry("a"), "id: key 'a': id occurs twice"),
        (entry("a", extra="expires = 'soon'"), "expires: key 'a': expires: Invalid RFC3339"),
        (entry("a", extra="secret = 'plain'"), "secret: key 'a': unknown field `secret`"),
        (entry("a") + "[[key]] # no more\nid = 'b'\n", "[[key]] # no more: key 'b': missing required field"),
        ("[[certificate]]\nname = ''\ntenant = 'a'\n", "name: certificate '': name must not be empty"),
        (entry("a", tenant="b.c") + "[tenants.'b.c']\nweight = 1\nmax_sessions = 'x'\n",
         "max_sessions: tenant 'b.c': max_sessions: Expected"),
        (entry("a") + "[tenants.acmee]\nmax_sessions = 1\n", "[tenants.acmee]: tenant 'acmee' has limits"),
        (entry("a") + "[limit]\nmax_sessions = 1\n", "[limit]: nothing is called 'limit'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_by_line_and_field(tmp_path: Path, text: str, told: str) -> None:
    """``told``: how the line begins, and what is said of it."""
    path = tmp_path / "keys.toml"
    path.write_text(text)
    begins, _, problem = told.partition(": ")
    with pytest.raises(ValueError) as caught:
        load_keys(path)
    place = re.fullmatch(rf"{re.escape(str(path))}:(\d+): (.*)", str(caught.value))
    assert place is not None, caught.value
    assert text.splitlines()[int(place[1]) - 1].startswith(begins)
    assert place[2].startswith(problem)
    if text.count(begins) > 1:
        assert begins not in "\n".join(text.splitlines()[int(place[1]) :]), "of the entry that is wrong"
