"""A stand-in for a model hub on this machine: what ``huggingface_hub`` asks of it, and no more."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StandInHub:
    """Repositories by name, each with its files. Serve with ``serve``."""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        self.repositories = repositories
        self.fetched: list[str] = []
        """Files whose content was sent, in order."""
        self.short = False
        """Whether connections end in the middle of a file."""
        self.url = ""

    @contextlib.contextmanager
    def serve(self) -> Iterator[StandInHub]:
        """Answers at ``url``, on the loopback, as long as the block lasts."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = unquote(urlsplit(request.path).path)
        kind, _, rest = path.removeprefix("/").partition("/")
        if kind == "api":
            repo = "/".join(rest.removeprefix("models/").split("/")[:2])
            files = self.repositories.get(repo)
            if files is None:
                self._send(request, b"{}", 404, {"X-Error-Code": "RepoNotFound"}, body)
            elif "/tree/" in rest:
                entries = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
                self._send(request, json.dumps(entries).encode(), 200, {}, body)
            else:
                info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                self._send(request, json.dumps(info).encode(), 200, {}, body)
            return
        repo, _, place = path.removeprefix("/").partition("/resolve/")
        name = place.partition("/")[2]
        data = self.repositories.get(repo, {}).get(name)
        if data is None:
            self._send(request, b"", 404, {"X-Error-Code": "EntryNotFound"}, body)
            return
        marks = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if body:
            self.fetched.append(name)
        self._send(request, data, 200, marks, body, short=self.short and body)

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        data: bytes,
        status: int,
        headers: Mapping[str, str],
        body: bool,
        short: bool = False,
    ) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            request.wfile.write(data[: len(data) // 2] if short else data)
        if short:
            request.close_connection = True
