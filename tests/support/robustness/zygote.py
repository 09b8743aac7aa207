"""A process that has imported all that a server needs, and forks one in milliseconds; its arguments: SOCKET OWNER.

Each connection to its Unix socket brings one line of JSON, a ``Birth``. The child's standard output is that connection:
its process id, then the server's own first line; the connection closes when the child is gone. The servers are whole
ones, on the braked hash engine, whose engine processes are started by them as ever; they die with this process, and it
with the one that started it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from pathlib import Path

import msgspec

import pensieve.server.app  # noqa: F401
from pensieve import debug
from pensieve.lifeline import die_with_parent
from pensieve.options.serve import ServeOptions
from pensieve.server.app import run
from support.faults.fault_engine import BUILDER
from support.robustness import planted

_LINE = 1 << 16


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is started with."""

    options: ServeOptions
    errors: str
    """File that its log is appended to."""
    failpoints: str = ""
    bug: str = ""
    """One of ``planted.BUGS``; "": the server as it is."""


def _child(order: Birth, connection: socket.socket, parent: int) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not die_with_parent(parent):
        return 1
    os.dup2(connection.fileno(), 1)
    connection.close()
    errors = os.open(order.errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(errors, 2)
    print(os.getpid(), flush=True)
    os.environ["PENSIEVE_FAILPOINTS"] = order.failpoints  # for its engine
    debug.arm(order.failpoints)
    if order.bug:
        planted.plant(order.bug)
    return run(order.options, builder=BUILDER)


def _status(order: Birth, connection: socket.socket, parent: int) -> int:
    """The child must not return into the zygote's loop, whatever it raises."""
    try:
        return _child(order, connection, parent)
    except BaseException:
        traceback.print_exc()
        return 1


def main(path: str, owner: int) -> None:
    """Serve until the owner is gone."""
    if not die_with_parent(owner):
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel forgets children by itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads must not fork"
    parent = os.getpid()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(16)
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                line = connection.makefile("rb").readline(_LINE)
                if not line:
                    continue
                if os.fork() == 0:
                    listener.close()
                    os._exit(_status(msgspec.json.decode(line, type=Birth), connection, parent))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
