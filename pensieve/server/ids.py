"""Ids made by the server, and session names on the wire."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import uuid

from pensieve.core import SessionKey
from pensieve.store import Key

SESSION_PREFIX = "sessions/"
SESSION_ID = re.compile(r"[a-z0-9][a-z0-9-]{2,62}", re.ASCII)
SESSION_NAME = re.compile(r"sessions/[a-z0-9][a-z0-9-]{2,62}", re.ASCII)
REQUEST_ID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)


def session_name(session_id: str) -> str:
    return SESSION_PREFIX + session_id


def session_id(name: str) -> str:
    return name.removeprefix(SESSION_PREFIX)


def claims_tenant(tenant: str) -> str:
    """Return the internal tenant that holds this tenant's claims of request ids. No credential can name it."""
    return f"{tenant}:claims"


def session_key(key: Key) -> SessionKey:
    return SessionKey(f"{key.tenant}/{key.session_id}")


def derived_session_id(purpose: str, tenant: str, request_id: str) -> str:
    """Return the id of the session that this request creates. A retry computes the same id and finds the session.
    Without a request id it is random. 128 bits either way, as 26 characters of lower-case base32."""
    if request_id:
        source = "\0".join((purpose, tenant, request_id)).encode()
        digest = hashlib.blake2b(source, digest_size=16, person=b"pensieve.session").digest()
    else:
        digest = secrets.token_bytes(16)
    return base64.b32encode(digest).decode("ascii").rstrip("=").lower()


def new_request_id() -> str:
    return str(uuid.uuid4())


def new_token() -> str:
    """Return 128 random bits in hex. They prove to the store that a turn holds its lease."""
    return secrets.token_hex(16)


def new_attempt() -> str:
    """Return a name for one attempt to generate a turn, shown to the client."""
    return secrets.token_hex(8)


def turn_seed(key: Key, request_id: str) -> int:
    """Return the seed of a turn that names none, 63 bits. It is the same for all attempts, on every server.

    So a partly streamed answer continues unchanged after a crash of engine or server, with nothing stored for that.
    Request ids are random, so seeds are as good as random.
    """
    name = "\0".join((key.tenant, key.session_id, request_id)).encode()
    digest = hashlib.blake2b(name, digest_size=8, person=b"pensieve.seed").digest()
    return int.from_bytes(digest, "big") >> 1
