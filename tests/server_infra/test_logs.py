"""Both log formats, and a stderr that takes nothing for a while."""

from __future__ import annotations

import ast
import asyncio
import errno
import json
import logging
import os
import sys

import pytest

from pensieve import logs
from pensieve.event_names import EVENT_NAMES
from pensieve.logs import AcceptErrorFilter, JsonFormatter, TextFormatter, ThreadedHandler, ThreadedWriter
from support.faults.pipes import fill
from support.sources import nodes, python_files


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


@pytest.mark.fault(61)
def test_a_stderr_that_takes_nothing_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines wait, in order, up to a limit; how many were dropped is told behind them."""
    monkeypatch.setattr(logs, "MOST_WAITING", 5)
    reading, writing = os.pipe()
    handler = ThreadedHandler(ThreadedWriter(writing))
    handler.setFormatter(logging.Formatter("%(message)s"))

    def say(text: str) -> None:
        handler.handle(logging.LogRecord("x", logging.INFO, "", 0, text, None, None))

    say("at once")
    assert os.read(reading, 100) == b"at once\n"
    filling = fill(writing)
    for number in range(8):
        say(f"line {number}")
    got = b""
    while len(got) < filling or not got.endswith(b"line 4\n"):
        got += os.read(reading, 1 << 16)
    assert got[filling:] == b"".join(b"line %d\n" % number for number in range(5))
    assert handler._writer.wait_written(20)
    say("and on")
    assert os.read(reading, 100) == b"3 log lines were dropped: stderr was blocked\nand on\n"


@pytest.mark.fault(61)
def test_a_stderr_that_is_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    handler = ThreadedHandler(ThreadedWriter(writing))
    handler.handle(record())
    assert handler._writer.wait_written(20)


async def test_an_error_of_the_loop_without_a_message_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """uvloop reports some like that."""
    error = OSError(errno.EMFILE, "Too many open files")
    AcceptErrorFilter()(asyncio.get_running_loop(), {"exception": error})
    assert [record.exc_info and record.exc_info[1] for record in caplog.records] == [error]


def test_events_keep_their_names() -> None:
    """Each reworded template is still logged somewhere, and JSON lines name it as before."""
    logged = {
        node.value
        for path in python_files("pensieve", "store", "kernels")
        for node in nodes(path)
        if path.name != "event_names.py" and isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert set(EVENT_NAMES) <= logged
    template = "engine exits: %s"
    made = logging.LogRecord("pensieve.x", logging.INFO, __file__, 1, template, ("why",), None)
    line = json.loads(JsonFormatter().format(made))
    assert (line["event"], line["message"]) == ("engine leaves: %s", "engine exits: why")
