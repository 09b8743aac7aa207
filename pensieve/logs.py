"""Logging of front end and engine: to stderr, as text or as one JSON object per line. A stderr that nobody reads (a log
collector that stands still, a terminal that was paused) holds up nobody.

Each process configures it once, before any channel or server exists, and never again (grpcio can deadlock on a later
reconfiguration). Log ids, counts and durations; never prompts, outputs or credentials. Fields go into
``extra={"turn": …}``, or are bound to all that a task logs from here on (``bind``).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import logging
import math
import os
import time
from collections.abc import Mapping
from functools import cache
from logging.handlers import QueueHandler, QueueListener
from queue import Queue
from types import MappingProxyType
from typing import Any, Final

import msgspec

log = logging.getLogger(__name__)

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_encoder = msgspec.json.Encoder(enc_hook=str)
_NOTHING: Final[Mapping[str, object]] = MappingProxyType({})
STDERR: Final = 2
PATIENCE_S: Final = 0.05
"""How long whoever logs waits for a line to be written. No more lines are waited for then until all are written."""
MOST_WAITING: Final = 10_000
"""Lines that wait to be written; further ones are dropped, and counted."""
TELL_AGAIN_S: Final = 60.0
"""Between two lines about connections that cannot be accepted."""
_LACKS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_bound: Final = contextvars.ContextVar("pensieve_log", default=_NOTHING)


def bind(**fields: object) -> None:
    """Add fields to whatever the present context logs: this task, and those that it starts. Empty ones are left out."""
    _bound.set({**_bound.get(), **{name: value for name, value in fields.items() if value}})


def bound_fields() -> Mapping[str, object]:
    """What ``bind`` has added here, for lines about the same thing that another task logs."""
    return _bound.get()


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    own = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    return {**_bound.get(), **own}


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z INFO pensieve.server.app: text key=value``, UTC."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _extras(record).items())
        line = f"{_timestamp(record)} {record.levelname} {record.name}: {record.getMessage()}{fields}"
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (RFC 3339, UTC), level, logger, event, message, the record's fields, exception.

    ``event`` is the message before anything was filled in: lines about the same thing have the same.
    """

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname,
            "logger": record.name,
            "event": record.msg,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return _encoder.encode(entry).decode()


def _timestamp(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


class ThreadedWriter(QueueListener):
    """Writes to a file descriptor in a thread of its own, which may be held up for as long as it takes.

    What was to be written is written when ``write`` returns, as long as the descriptor takes anything. The thread does
    not go through ``sys.stderr``, whose lock Python wants to have when it ends.
    """

    queue: Queue[bytes]

    def __init__(self, descriptor: int) -> None:
        super().__init__(Queue())
        self._descriptor = descriptor
        self._stuck = False
        self.dropped = 0
        """How much was not written, because too much waits."""
        self.start()

    def write(self, data: bytes) -> None:
        if self.queue.unfinished_tasks >= MOST_WAITING:
            self.dropped += 1
            return
        if self.wait_written(0):
            self._stuck = False
        self.queue.put(data)
        if not self._stuck:
            self._stuck = not self.wait_written(PATIENCE_S)

    def wait_written(self, limit_s: float) -> bool:
        """Whether all is written by then."""
        with self.queue.all_tasks_done:
            return self.queue.all_tasks_done.wait_for(lambda: not self.queue.unfinished_tasks, limit_s)

    def handle(self, data: bytes) -> None:  # type: ignore[override]  # lines, formatted where they were logged
        with contextlib.suppress(OSError):  # who should be told that nobody can be told?
            while data:
                data = data[os.write(self._descriptor, data) :]


@cache
def stderr_writer() -> ThreadedWriter:
    """The one way to stderr of a process that serves."""
    return ThreadedWriter(STDERR)


class ThreadedHandler(QueueHandler):
    """Log lines to a ``ThreadedWriter``. They are formatted by the thread that logs: fields are bound to its context."""

    def __init__(self, writer: ThreadedWriter) -> None:
        super().__init__(writer.queue)
        self._writer = writer
        self._told = 0

    def prepare(self, record: logging.LogRecord) -> bytes:
        line = self.format(record)
        if self._writer.dropped > self._told and self._writer.wait_written(0):
            line = f"{self._tell()}\n{line}"
        return f"{line}\n".encode(errors="backslashreplace")

    def enqueue(self, record: bytes) -> None:  # type: ignore[override]  # as ``prepare`` returns it
        self._writer.write(record)

    def flush(self) -> None:
        """Called when the process ends."""
        self._writer.wait_written(PATIENCE_S)

    def _tell(self) -> str:
        """Of lines that were dropped; said once there is room."""
        text = "%d log lines were dropped: nothing took them"
        dropped, self._told = self._writer.dropped - self._told, self._writer.dropped
        return self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, text, (dropped,), None))


def configure_logging(*, level: str = "INFO", json_lines: bool = False) -> None:
    """Install the one handler of this process. Raises ValueError on an unknown level."""
    handler = ThreadedHandler(stderr_writer())
    handler.setFormatter(JsonFormatter() if json_lines else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def writes_json() -> bool:
    """Whether this process was configured to write JSON lines."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


class AcceptErrorFilter:
    """An event loop's exception handler. When no file is left for a connection, asyncio reports that for each place in
    the backlog, with a traceback, and again every second; here it is a line a minute. The rest is as by default."""

    def __init__(self) -> None:
        self._told_at = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, message = context.get("exception"), context["message"]
        if isinstance(error, OSError) and error.errno in _LACKS and "accept" in message:
            if loop.time() - self._told_at >= TELL_AGAIN_S:
                self._told_at = loop.time()
                log.error("connections wait, no more files can be opened: %s", error.strerror)
        elif not (isinstance(error, ValueError) and "_start_serving" in message):  # it has closed since
            loop.default_exception_handler(context)
