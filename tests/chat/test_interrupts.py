"""A Ctrl-C between the drawing of the prompt and the editor's waiting for keys."""

from __future__ import annotations

import sys

from support.terminal import Terminal

PROGRAM = """
import functools, os, readline, signal
from pensieve.cli.chat.prompt import wake_on_interrupt

# The hook runs behind the drawing. It is no Python code, and killpg does not look for signals: nobody sees this one.
readline.set_pre_input_hook(functools.partial(os.killpg, 0, signal.SIGINT))
try:
    with wake_on_interrupt():
        input("you> ")
except KeyboardInterrupt:
    print("heard")
print(signal.getsignal(signal.SIGURG) is signal.SIG_DFL, signal.set_wakeup_fd(-1))
"""


def test_it_is_heard_without_a_key_and_all_is_as_before() -> None:
    with Terminal(program=(sys.executable, "-P", "-c", PROGRAM)) as terminal:
        terminal.prompt()
        terminal.expect("heard")
        terminal.expect("True -1")
        assert terminal.end() == 0
