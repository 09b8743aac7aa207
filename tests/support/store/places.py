"""A store and all bytes that it keeps, to search for what was erased."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import redis


class Place:
    """A store, and all bytes that it keeps."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder

    def files(self) -> bytes:
        """The files of SQLite; every value of Redis, as it is dumped without compression."""
        if self.url.startswith("redis"):
            return b"".join(self._values())
        return b"".join(file.read_bytes() for file in self.folder.iterdir() if file.is_file())

    def _values(self) -> Iterator[bytes]:
        with redis.Redis.from_url(self.url) as client:
            client.config_set("rdbcompression", "no")
            for name in client.keys("*"):
                yield client.dump(name) or b""
