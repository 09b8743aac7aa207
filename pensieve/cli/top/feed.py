"""The feed of an admin port, as far as ``top`` shows it: ``docs/page.md`` has all of it.

Everything has a default: an older or newer server that lacks a field is shown without it.
"""

from __future__ import annotations

import http.client
import json
import socket
from http import HTTPStatus
from typing import Final

import msgspec

SCHEMA: Final = "pensieve.state/1"
PATIENCE_S: Final = 5.0
"""A server that says nothing for so long is gone."""
MOST_BYTES: Final = 1 << 26
MOST_SESSIONS: Final = 5000
"""What the feed tells at once, at most."""


class FeedDoor(msgspec.Struct, frozen=True):
    """The HTTP door. ``since_s``: Unix time, of the server's clock as ``FeedState.time_s``."""

    state: str = ""
    address: str = ""
    since_s: float = 0.0
    restarts: int = 0


class FeedServer(msgspec.Struct, frozen=True):
    version: str = ""
    model: str = ""
    replica: str = ""
    problem: str = ""
    device: str = ""
    dtype: str = ""
    chunk_tokens: int = 0
    door: FeedDoor | None = None
    """None: there is none, or the server does not tell."""


class FeedTier(msgspec.Struct, frozen=True):
    """Tokens."""

    capacity: int = 0
    used: int = 0
    reclaimable: int = 0


class FeedQueue(msgspec.Struct, frozen=True):
    running: int = 0
    queued: int = 0
    waiting: int = 0
    expected_wait_s: float = 0.0


class FeedTotals(msgspec.Struct, frozen=True):
    suspensions_total: int = 0


class FeedRates(msgspec.Struct, frozen=True):
    """Per second."""

    steps: float = 0.0
    swap_in_bytes: float = 0.0
    swap_out_bytes: float = 0.0
    dropped_tokens: float = 0.0


class FeedLatency(msgspec.Struct, frozen=True):
    """Seconds."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float | None = None
    """None: from a server that does not tell it."""


class FeedContext(msgspec.Struct, frozen=True):
    """Tokens."""

    device: int = 0
    host: int = 0
    recomputed: int = 0
    new: int = 0


class FeedLately(msgspec.Struct, frozen=True):
    over_s: float = 60.0
    turns: int = 0
    failed: int = 0
    turns_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    first_token_s: FeedLatency | None = None
    token_s: FeedLatency | None = None
    queue_s: FeedLatency | None = None
    context: FeedContext = FeedContext()


class FeedSession(msgspec.Struct, frozen=True):
    session: str = ""
    tenant: str = ""
    state: str = ""
    idle_s: float = 0.0
    tokens: int = 0
    strip: str = ""
    labels: dict[str, str] | None = None


class FeedSessions(msgspec.Struct, frozen=True):
    total: int = 0
    running: int = 0
    age_s: float | None = None
    rows: tuple[FeedSession, ...] = ()


class FeedState(msgspec.Struct, frozen=True):
    schema: str
    time_s: float = 0.0
    server: FeedServer = FeedServer()
    device: FeedTier = FeedTier()
    host: FeedTier = FeedTier()
    queue: FeedQueue = FeedQueue()
    totals: FeedTotals = FeedTotals()
    engine_restarts: int = 0
    rates: FeedRates | None = None
    lately: FeedLately = FeedLately()
    sessions: FeedSessions = FeedSessions()


class FeedError(Exception):
    """No state; the message is one line."""


class AdminFeed:
    """Asks one admin port. Thread-safe."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        """``address``: HOST:PORT."""
        self.address = address
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def state(self, limit: int) -> FeedState:
        """The state with the ``limit`` most active sessions. Raises FeedError."""
        return decode(self.document(limit), self.address)

    def document(self, limit: int) -> bytes:
        """The same as JSON, as it came. Raises FeedError."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=PATIENCE_S)
        try:
            connection.connect()
            # The port answers to its address only, and not to any name a browser may have been given for it.
            connection.request(
                "GET", f"/state.json?limit={limit}", headers={"Host": _peer(connection.sock), **self._headers}
            )
            answer = connection.getresponse()
            body = answer.read(MOST_BYTES)
        except TimeoutError as error:
            raise FeedError(f"{self.address} does not answer") from error
        except OSError as error:
            raise FeedError(f"nothing to be reached at {self.address}: {error.strerror or error}") from error
        except (http.client.HTTPException, ValueError) as error:
            raise FeedError(_no_feed(self.address)) from error
        finally:
            connection.close()
        if answer.status != HTTPStatus.OK:
            raise FeedError(_refusal(self.address, answer.status, body))
        return body


def decode(document: bytes, address: str) -> FeedState:
    """Raises FeedError when it is no state of this schema."""
    try:
        state = msgspec.json.decode(document, type=FeedState)
    except msgspec.DecodeError as error:
        raise FeedError(_no_feed(address)) from error
    if state.schema != SCHEMA:
        raise FeedError(f"{address} speaks {state.schema!r}; this version of pensieve reads {SCHEMA!r}")
    return state


def _peer(sock: socket.socket) -> str:
    host = str(sock.getpeername()[0])
    return f"[{host}]" if ":" in host else host


def _no_feed(address: str) -> str:
    return f"what answers at {address} is no admin port of pensieve; a server's ready line names its own: admin=…"


def _refusal(address: str, status: int, body: bytes) -> str:
    """A line for an answer that is none."""
    try:
        said = json.loads(body)
        reason, message = str(said["reason"]), str(said["message"])
    except (ValueError, KeyError, TypeError):
        return _no_feed(address)
    if status == HTTPStatus.UNAUTHORIZED:
        return f"{address} wants --api-key, a key with the scope admin ({reason})"
    return f"{address}: {message} ({reason})"
