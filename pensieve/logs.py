"""Logging of front end and engine: to stderr, as text or as one JSON object per line.

Each process configures it once, before any channel or server exists, and never again (grpcio can deadlock on a later
reconfiguration). Log ids, counts and durations; never prompts, outputs or credentials. Fields go into
``extra={"turn": …}``, or are bound to all that a task logs from here on (``bind``).
"""

from __future__ import annotations

import contextvars
import logging
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_encoder = msgspec.json.Encoder(enc_hook=str)
_NOTHING: Final[Mapping[str, object]] = MappingProxyType({})
_bound: Final = contextvars.ContextVar("pensieve_log", default=_NOTHING)


def bind(**fields: object) -> None:
    """Add fields to whatever the present context logs: this task, and those that it starts. Empty ones are left out."""
    _bound.set({**_bound.get(), **{name: value for name, value in fields.items() if value}})


def bound() -> Mapping[str, object]:
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


def configure_logging(*, level: str = "INFO", json_lines: bool = False) -> None:
    """Install the one handler of this process. Raises ValueError on an unknown level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json_lines else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def writes_json() -> bool:
    """Whether this process was configured to write JSON lines."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
