"""States as the feed tells them, and an admin port that tells them: for ``pensieve top`` without a server."""

from __future__ import annotations

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

STRIPS = ("d3b2", "x4h6b2d3", "D6d2n1", "x3r2d1", "h2i2d8o1")


def row(number: int, **changes: Any) -> dict[str, Any]:
    """One session; the first two run."""
    strip = STRIPS[number % len(STRIPS)]
    return {
        "session": f"default/chat-{number:04}",
        "tenant": "default",
        "id": f"chat-{number:04}",
        "candidate": 0,
        "state": "running" if number < 2 else "idle",
        "idle_s": 3.0 * number,
        "tokens": 100 + number,
        "strip": strip,
        "labels": {"title": f"talk {number}"},
        "items": 4,
        "created_s": 1.7e9,
    } | changes


def state(sessions: int = 5, **changes: Any) -> dict[str, Any]:
    """A server of so many sessions; ``changes`` are whole parts of it."""
    rows = [row(number) for number in range(sessions)]
    return {
        "schema": "pensieve.state/1",
        "time_s": 1.7e9,
        "server": {
            "version": "9.8.7", "model": "pocket", "replica": "left", "problem": "", "device": "cpu",
            "dtype": "float32", "chunk_tokens": 32, "context_limit": 4096, "shows_text": False,
        },
        "device": {"capacity": 8192, "used": 6144, "free": 2048, "reclaimable": 512},
        "host": {"capacity": 16384, "used": 1638, "free": 14746, "reclaimable": 0},
        "queue": {"running": 4, "queued": 3, "waiting": 2, "expected_wait_s": 0.3},
        "totals": {"suspensions_total": 17},
        "engine_restarts": 1,
        "rates": {
            "over_s": 1.0, "steps": 44.0, "output_tokens": 90.0, "swap_in_bytes": 1.5e6, "swap_out_bytes": 2.5e3,
            "dropped_tokens": 120.0,
        },
        "lately": {
            "over_s": 60.0, "turns": 192, "failed": 2, "turns_per_s": 3.2, "output_tokens_per_s": 96.0,
            "first_token_s": {"p50": 0.12, "p95": 0.4, "p99": 0.72},
            "token_s": {"p50": 0.0084, "p95": 0.009, "p99": 0.014},
            "queue_s": {"p50": 0.001, "p95": 0.002, "p99": 0.003},
            "context": {"device": 60_000, "host": 24_000, "recomputed": 12_000, "new": 24_000},
        },
        "sessions": {
            "total": sessions, "running": min(sessions, 2), "age_s": 0.1, "first": 0, "next": None, "rows": rows
        },
    } | changes  # fmt: skip


class FeedStub:
    """An admin port on a port of its own. ``state`` may be changed; ``close`` and ``open`` make it go and come back."""

    def __init__(self) -> None:
        self.state = state()
        self.status = 200
        self.body: bytes | None = None
        """What is answered in place of the state."""
        self.asked: list[tuple[str, dict[str, str]]] = []
        """Paths with headers."""
        self.answering = threading.Event()
        """Cleared: requests are taken and not answered."""
        self.answering.set()
        self._port = 0
        self._server: ThreadingHTTPServer | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def open(self) -> None:
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stub.asked.append((self.path, dict(self.headers)))
                stub.answering.wait()
                limit = int(parse_qs(urlsplit(self.path).query).get("limit", ["200"])[0])
                sessions = stub.state["sessions"]
                told = stub.state | {"sessions": sessions | {"rows": sessions["rows"][:limit]}}
                body = stub.body if stub.body is not None else json.dumps(told).encode()
                with contextlib.suppress(ConnectionError):  # who asked has left
                    self.send_response(stub.status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.answering.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
