"""Asks an admin port for its state: ``docs/page.md``."""

from __future__ import annotations

import http.client
import json
import socket
from http import HTTPStatus
from typing import Final

import msgspec

from pensieve.feed import SCHEMA, StateDocument

PATIENCE_S: Final = 5.0
"""A server that says nothing for so long is gone."""
MOST_BYTES: Final = 1 << 26


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

    def state(self, limit: int) -> StateDocument:
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


def decode(document: bytes, address: str) -> StateDocument:
    """Raises FeedError when it is no state of this schema."""
    try:
        state = msgspec.json.decode(document, type=StateDocument)
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
