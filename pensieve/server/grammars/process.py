"""Main of the process that compiles grammars: ``python -P -m pensieve.server.grammars.process FD``.

It reads ``CheckGrammar``s from its socket and answers each with ``Checked``. A grammar that takes more than
``COMPILE_CPU_S`` of processor time ends the process by a signal, one that takes more than ``MEMORY`` by a failed
allocation. The server then starts a new one.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from typing import Final

import msgspec

from pensieve.frames import FrameSocket, PeerClosed, decoder_for
from pensieve.lifeline import leave_signals_to_parent

COMPILE_CPU_S: Final = 0.5
MEMORY: Final = 2 << 30
_FOREVER_S: Final = 3600.0
_NICENESS: Final = 10
"""Turns that run go before grammars that are new."""


class CheckGrammar(msgspec.Struct, frozen=True):
    text: str
    """JSON, as ``speech.grammar_text`` returns it for one part."""


class Checked(msgspec.Struct, frozen=True):
    problem: tuple[str, str] | None = None
    """Text and place."""


def main(fd: int) -> None:
    """Answer until the server closes its end."""
    leave_signals_to_parent()
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # After the limits: the import is part of what they are for.
    from pensieve.server.grammars.check import find_problem

    frames = FrameSocket(socket.socket(fileno=fd))
    decoder = decoder_for(CheckGrammar)
    while True:
        try:
            requests = frames.receive(decoder, _FOREVER_S)
        except PeerClosed:
            return
        for request in requests:
            signal.setitimer(signal.ITIMER_PROF, COMPILE_CPU_S)
            problem = find_problem(json.loads(request.text)["grammars"][0])
            signal.setitimer(signal.ITIMER_PROF, 0)
            frames.send(Checked(problem))


if __name__ == "__main__":
    main(int(sys.argv[1]))
