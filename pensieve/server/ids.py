"""Ids that the server makes, and names of sessions on the wire."""

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
    """The id in a name that was validated before."""
    return name.removeprefix(SESSION_PREFIX)


def claims_tenant(tenant: str) -> str:
    """The tenant under which the store keeps this tenant's claims of request ids; a credential names no such one."""
    return f"{tenant}:claims"


def session_key(key: Key) -> SessionKey:
    """Names the session in the engine's cache."""
    return SessionKey(f"{key.tenant}/{key.session_id}")


def derived_session_id(purpose: str, tenant: str, request_id: str) -> str:
    """The id of the session that this request makes: a retry computes the same one and so meets the same session.

    A request without an id gets a random one. 128 bits either way, as 26 characters of lower-case base32.
    """
    if request_id:
        source = "\0".join((purpose, tenant, request_id)).encode()
        digest = hashlib.blake2b(source, digest_size=16, person=b"pensieve.session").digest()
    else:
        digest = secrets.token_bytes(16)
    return base64.b32encode(digest).decode("ascii").rstrip("=").lower()


def new_request_id() -> str:
    """For a change whose caller gave none."""
    return str(uuid.uuid4())


def new_token() -> str:
    """128 random bits, hex: proves to the store that a turn holds its lease."""
    return secrets.token_hex(16)


def new_attempt() -> str:
    """Names one generation attempt of a turn to the client."""
    return secrets.token_hex(8)


def turn_seed(key: Key, request_id: str) -> int:
    """The seed of a turn that names none, 63 bits. It is the same for all tries of the turn, on every server.

    So an answer that was streamed in part goes on as it began when the engine or the server dies, and nothing has to be
    kept for that. Request ids are drawn at random, so seeds are as good as drawn.
    """
    name = "\0".join((key.tenant, key.session_id, request_id)).encode()
    digest = hashlib.blake2b(name, digest_size=8, person=b"pensieve.seed").digest()
    return int.from_bytes(digest, "big") >> 1
