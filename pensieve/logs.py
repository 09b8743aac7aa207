"""Logging to stderr, as text or one JSON object per line. A blocked stderr (a stalled log collector, a paused
terminal) does not block the process.

Configure it once per process, before any channel or server exists: grpcio can deadlock on a later change. Log ids,
counts and durations; never prompts, outputs or credentials. Fields go into ``extra={"turn": …}``, or are bound to
everything that a task logs from then on (``bind``).
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
from collections.abc import Callable, Mapping
from functools import cache, wraps
from logging.handlers import QueueHandler, QueueListener
from queue import Queue
from types import MappingProxyType
from typing import Any, Final

import click
import msgspec

from pensieve.event_names import EVENT_NAMES

log = logging.getLogger(__name__)

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_encoder = msgspec.json.Encoder(enc_hook=str)
_NO_FIELDS: Final[Mapping[str, object]] = MappingProxyType({})
STDERR: Final = 2
WRITE_TIMEOUT_S: Final = 0.05
"""How long a log call waits for its line to be written. After a timeout, log calls do not wait again until
the queue has drained."""
MOST_WAITING: Final = 10_000
"""Queued lines. Further ones are dropped and counted."""
REPEAT_S: Final = 60.0
"""Interval between log lines about connections that cannot be accepted."""
_OUT_OF_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_bound: Final = contextvars.ContextVar("pensieve_log", default=_NO_FIELDS)


def bind(**fields: object) -> None:
    """Add fields to all that the current context logs: this task and tasks it starts. Empty values are omitted."""
    _bound.set({**_bound.get(), **{name: value for name, value in fields.items() if value}})


def bound_fields() -> Mapping[str, object]:
    """Return the fields added by ``bind``, for another task that logs about the same thing."""
    return _bound.get()


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    own = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    return {**_bound.get(), **own}


class TextFormatter(logging.Formatter):
    """Formats as ``2026-01-31T12:00:00.123Z INFO pensieve.server.app: text key=value``, in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _extras(record).items())
        line = f"{_timestamp(record)} {record.levelname} {record.name}: {record.getMessage()}{fields}"
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (RFC 3339, UTC), level, logger, event, message, the record's fields, exception.
    ``event`` is the message template, or its older name: the same in all lines of one kind."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname,
            "logger": record.name,
            "event": EVENT_NAMES.get(record.msg, record.msg),
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
    """Writes to a file descriptor in a thread, which may block. ``write`` returns when the data is written, unless
    the descriptor blocks. The thread avoids ``sys.stderr``, because Python needs its lock at exit."""

    queue: Queue[bytes]

    def __init__(self, descriptor: int) -> None:
        super().__init__(Queue())
        self._descriptor = descriptor
        self._blocked = False
        self.dropped = 0
        """Number of writes dropped because the queue was full."""
        self.start()

    def write(self, data: bytes) -> None:
        if self.queue.unfinished_tasks >= MOST_WAITING:
            self.dropped += 1
            return
        if self.wait_written(0):
            self._blocked = False
        self.queue.put(data)
        if not self._blocked:
            self._blocked = not self.wait_written(WRITE_TIMEOUT_S)

    def wait_written(self, limit_s: float) -> bool:
        """Wait until all is written, up to ``limit_s``. Return whether it is."""
        with self.queue.all_tasks_done:
            return self.queue.all_tasks_done.wait_for(lambda: not self.queue.unfinished_tasks, limit_s)

    def handle(self, data: bytes) -> None:  # type: ignore[override]  # lines, formatted where they were logged
        with contextlib.suppress(OSError):  # there is no other place to report it
            while data:
                data = data[os.write(self._descriptor, data) :]


@cache
def stderr_writer() -> ThreadedWriter:
    """Return the only writer to stderr of a serving process."""
    return ThreadedWriter(STDERR)


class ThreadedHandler(QueueHandler):
    """Sends log lines to a ``ThreadedWriter``. Formats in the logging thread, because fields are bound to its
    context."""

    def __init__(self, writer: ThreadedWriter) -> None:
        super().__init__(writer.queue)
        self._writer = writer
        self._reported = 0

    def prepare(self, record: logging.LogRecord) -> bytes:
        line = self.format(record)
        if self._writer.dropped > self._reported and self._writer.wait_written(0):
            line = f"{self._dropped_line()}\n{line}"
        return f"{line}\n".encode(errors="backslashreplace")

    def enqueue(self, record: bytes) -> None:  # type: ignore[override]  # as ``prepare`` returns it
        self._writer.write(record)

    def flush(self) -> None:
        self._writer.wait_written(WRITE_TIMEOUT_S)

    def _dropped_line(self) -> str:
        """Return a line that reports dropped lines; call once there is room."""
        text = "%d log lines were dropped: stderr was blocked"
        dropped, self._reported = self._writer.dropped - self._reported, self._writer.dropped
        return self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, text, (dropped,), None))


def configure_logging(*, level: str = "INFO", json_lines: bool = False) -> None:
    """Install the only handler of this process. Raises ValueError on an unknown level."""
    handler = ThreadedHandler(stderr_writer())
    handler.setFormatter(JsonFormatter() if json_lines else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def log_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a child process's command: add ``--log-level`` and ``--log-json``, and configure logging first."""

    @click.option("--log-level", default="INFO")
    @click.option("--log-json", is_flag=True)
    @wraps(command)
    def wrapped(*, log_level: str, log_json: bool, **others: Any) -> None:
        configure_logging(level=log_level, json_lines=log_json)
        command(**others)

    return wrapped


def writes_json() -> bool:
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


class AcceptErrorFilter:
    """Exception handler of an event loop, which limits one error to a line a minute.

    When no file descriptor is left for a connection, asyncio logs a traceback for each place in the backlog, every
    second. All other errors go to the default handler.
    """

    def __init__(self) -> None:
        self._logged_at = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, message = context.get("exception"), context.get("message", "")  # uvloop may give none
        if isinstance(error, OSError) and error.errno in _OUT_OF_RESOURCES and "accept" in message:
            if loop.time() - self._logged_at >= REPEAT_S:
                self._logged_at = loop.time()
                log.error("connections cannot be accepted, no file descriptor is free: %s", error.strerror)
        elif not (isinstance(error, ValueError) and "_start_serving" in message):  # the listener was closed
            loop.default_exception_handler(context)
