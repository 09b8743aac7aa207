"""Reads a server's state from its admin port: ``docs/page.md``."""

from __future__ import annotations

import http.client
import json
import socket
from http import HTTPStatus
from typing import Final

import msgspec

from pensieve.cli.admin import TIMEOUT_S, not_admin_port, refused, split_admin, unreachable
from pensieve.feed import SCHEMA, StateDocument

MAX_BYTES: Final = 1 << 26


class FeedError(Exception):
    """No state is available. The message is one line."""


class AdminFeed:
    """Client of one admin port. Thread-safe."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        self.address = address
        self._host, self._port = split_admin(address)
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
        except OSError as error:
            raise FeedError(unreachable(self.address, error)) from error
        except (http.client.HTTPException, ValueError) as error:
            raise FeedError(not_admin_port(self.address)) from error
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
        raise FeedError(not_admin_port(address)) from error
    if state.schema != SCHEMA:
        raise FeedError(f"{address} sends {state.schema!r}; this version of pensieve reads {SCHEMA!r}")
    return state


def _peer(sock: socket.socket) -> str:
    host = str(sock.getpeername()[0])
    return f"[{host}]" if ":" in host else host


def _error_line(address: str, status: int, body: bytes) -> str:
    try:
        said = json.loads(body)
        reason, message = str(said["reason"]), str(said["message"])
    except (ValueError, KeyError, TypeError):
        return not_admin_port(address)
    return refused(address, reason, message, unauthenticated=status == HTTPStatus.UNAUTHORIZED)
