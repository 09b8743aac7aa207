"""Both log formats."""

from __future__ import annotations

import json
import logging
import sys

from pensieve.logs import JsonFormatter, TextFormatter


def record(**extra: object) -> logging.LogRecord:
    made = logging.LogRecord("pensieve.x", logging.INFO, __file__, 1, "turn %s ended", ("t1",), None)
    made.created, made.msecs = 1_700_000_000.25, 250.0
    vars(made).update(extra)
    return made


def test_json_is_one_object_per_line_with_the_extra_fields() -> None:
    line = JsonFormatter().format(record(tokens=5))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "INFO",
        "logger": "pensieve.x",
        "event": "turn %s ended",
        "message": "turn t1 ended",
        "tokens": 5,
    }


def test_json_keeps_an_exception_on_the_line() -> None:
    made = record()
    try:
        raise ValueError("no")
    except ValueError:
        made.exc_info = sys.exc_info()
    line = JsonFormatter().format(made)
    assert "\n" not in line and "ValueError: no" in json.loads(line)["exception"]


def test_text_is_utc_and_ends_with_the_fields() -> None:
    line = TextFormatter().format(record(tokens=5))
    assert line == "2023-11-14T22:13:20.250Z INFO pensieve.x: turn t1 ended tokens=5"
