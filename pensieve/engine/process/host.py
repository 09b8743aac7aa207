"""Main of the engine process: ``python -P -m pensieve.engine.process.host --fd N``.

The process inherits one end of a socket pair. It reads its ``EngineOptions`` as the first frame, then
``Command``s, and answers with ``Report``s. An error is written to stderr, with the cause in the last line,
and ends the process with status 1 (2: options that cannot be followed). The front end then starts a new one.

The process does not outlive the front end: it leaves when the other end of the pair closes, and the kernel
kills it if it is stuck in a step then. It ignores SIGINT, SIGTERM and SIGHUP, which a terminal or service
manager sends to both processes: the front end drains and sends ``Stop``.
"""

from __future__ import annotations

import gc
import importlib
import logging
import socket
import sys
from collections.abc import Callable
from typing import Any, Final, cast

import click

from pensieve.config import EngineOptions
from pensieve.engine.messages import Command, Report
from pensieve.engine.process.loop import HostedEngine, RequestLogFilter, run_engine
from pensieve.errors import InvalidArgument, PensieveError
from pensieve.frames import FrameSocket, PeerClosed, decoder_for
from pensieve.lifeline import die_with_parent, leave_signals_to_parent
from pensieve.logs import log_options

log = logging.getLogger("pensieve.engine.process.host")  # also when this module is __main__

FAILURE_PREFIX: Final = "engine: "
"""Begins the last line on stderr of an engine that failed."""
REFUSED: Final = 2
"""Exit status when the options cannot be followed or the model cannot be served: a restart would not help."""
DEFAULT_BUILDER: Final = "pensieve.engine.build:build_engine"
_OPTIONS_TIMEOUT_S: Final = 30.0

Builder = Callable[[EngineOptions], HostedEngine]


class SocketChannel:
    """``loop.CommandChannel`` over a socket."""

    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames
        self._decoder = decoder_for(Command)

    def receive(self, timeout: float) -> list[Command]:
        return self._frames.receive(self._decoder, timeout)

    def send(self, report: Report) -> None:
        self._frames.send(report)


def load_builder(dotted: str) -> Builder:
    """Import the function named by ``package.module:name``. Importing the default one imports torch."""
    module, _, name = dotted.partition(":")
    builder: Any = getattr(importlib.import_module(module), name)
    return cast(Builder, builder)


def _read_options(frames: FrameSocket) -> EngineOptions:
    """Read the first frame. It comes alone: the front end sends commands only after ``EngineReady``."""
    options: list[EngineOptions] = frames.receive(decoder_for(EngineOptions), _OPTIONS_TIMEOUT_S)
    if len(options) != 1:
        raise PeerClosed("the front end sent no options")
    return options[0]


def _build(builder: str, options: EngineOptions) -> HostedEngine:
    try:
        build = load_builder(builder)
        gc.freeze()  # what imports have made stays: to look for garbage in it takes 0.1 s
        return build(options)
    except PensieveError:
        raise  # An operator can act on this (no such model, a pool too large): no traceback.
    except Exception:
        log.exception("engine did not start")
        raise


def _run(engine: HostedEngine, channel: SocketChannel) -> None:
    names = RequestLogFilter()
    for handler in logging.getLogger().handlers:
        handler.addFilter(names)
    try:
        run_engine(engine, channel, names)
    except PeerClosed:
        raise
    except Exception:
        # Do not continue: the state after half a step is unknown.
        log.exception("engine failed", extra={"requests": engine.announcer.requests})
        raise
    finally:
        engine.close()


def serve(fd: int, parent: int, builder: str) -> int:
    """Run an engine on the socket ``fd`` to its end; return the exit status."""
    frames = FrameSocket(socket.socket(fileno=fd))
    try:
        if not die_with_parent(parent):
            raise PeerClosed("the front end was gone before the engine started")
        options = _read_options(frames)
        gc.disable()  # imports make many objects and hardly any garbage: to look for it takes a tenth of the start
        engine = _build(builder, options)
        settle_collector()
        gc.enable()
        log.info("engine ready")
        _run(engine, SocketChannel(frames))
    except PeerClosed as error:
        log.info("engine exits: %s", error)
        return 0
    except PensieveError as error:
        return _failed(error.message, REFUSED if isinstance(error, InvalidArgument) else 1)
    except Exception as error:
        return _failed(f"{type(error).__name__}: {error}")
    finally:
        frames.close()
    return 0


def settle_collector() -> None:
    """Keep the garbage collector out of the steps to come.

    Objects that exist now stay, so it need not scan them, which would stop a step for milliseconds. Those of a step go
    when their last reference does. A step of 256 requests has more of them than Python's first threshold. To look for
    garbage among them took a quarter of the scheduler's time between a step's tokens and the next plan
    (``bench/results/drafts.md``).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def _failed(why: str, status: int = 1) -> int:
    """Write the cause as one plain last line on stderr, whatever the log format: the front end passes it on."""
    print(f"{FAILURE_PREFIX}{' '.join(why.split())}", file=sys.stderr, flush=True)
    return status


@click.command()
@click.option("--fd", type=int, required=True)
@click.option("--parent", type=int, required=True)
@click.option("--builder", default=DEFAULT_BUILDER)
@log_options
def main(fd: int, parent: int, builder: str) -> None:
    """Engine process of a Pensieve server; started by ``pensieve serve``, not by hand."""
    leave_signals_to_parent()
    sys.exit(serve(fd, parent, builder))


if __name__ == "__main__":
    main()
