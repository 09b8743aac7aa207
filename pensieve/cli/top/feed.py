"""Reads a server's state from its admin port: ``docs/page.md``."""

from __future__ import annotations

import http.client
import json
import socket
from http import HTTPStatus
from typing import Final

import msgspec

from pensieve.feed import SCHEMA, StateDocument

TIMEOUT_S: Final = 5.0
"""A server that does not answer within this time counts as lost."""
MAX_BYTES: Final = 1 << 26


class FeedError(Exception):
    """No state is available. The message is one line."""


class AdminFeed:
    """Client of one admin port. Thread-safe."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        self.address = address
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def state(self, limit: int) -> StateDocument:
        """Return the state with the ``limit`` most active sessions. Raises FeedError."""
        return decode(self.document(limit), self.address)

    def document(self, limit: int) -> bytes:
        """Return the same as the received JSON. Raises FeedError."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.connect()
            # The port answers only requests for its address, not for a name that a browser may have resolved to it.
            connection.request(
                "GET", f"/state.json?limit={limit}", headers={"Host": _peer(connection.sock), **self._headers}
            )
            answer = connection.getresponse()
            body = answer.read(MAX_BYTES)
        except TimeoutError as error:
            raise FeedError(f"{self.address} does not answer") from error
        except OSError as error:
            raise FeedError(f"cannot connect to {self.address}: {error.strerror or error}") from error
        except (http.client.HTTPException, ValueError) as error:
            raise FeedError(_not_admin_port(self.address)) from error
        finally:
            connection.close()
        if answer.status != HTTPStatus.OK:
            raise FeedError(_error_line(self.address, answer.status, body))
        return body


def decode(document: bytes, address: str) -> StateDocument:
    """Decode a state. Raises FeedError for another document or schema."""
    try:
        state = msgspec.json.decode(document, type=StateDocument)
    except msgspec.DecodeError as error:
        raise FeedError(_not_admin_port(address)) from error
    if state.schema != SCHEMA:
        raise FeedError(f"{address} sends {state.schema!r}; this version of pensieve reads {SCHEMA!r}")
    return state


def _peer(sock: socket.socket) -> str:
    host = str(sock.getpeername()[0])
    return f"[{host}]" if ":" in host else host


def _not_admin_port(address: str) -> str:
    return f"{address} is not an admin port of pensieve; the address is in the server's ready line: admin=…"


def _error_line(address: str, status: int, body: bytes) -> str:
    try:
        said = json.loads(body)
        reason, message = str(said["reason"]), str(said["message"])
    except (ValueError, KeyError, TypeError):
        return _not_admin_port(address)
    if status == HTTPStatus.UNAUTHORIZED:
        return f"{address} requires an API key with the scope admin: pass --api-key, or set PENSIEVE_API_KEY ({reason})"
    return f"{address}: {message} ({reason})"
