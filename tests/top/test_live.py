"""``pensieve top`` in a real terminal: keys, a server that goes and comes back, the terminal given back as it was."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support.page.feeds import FeedStub, state
from support.terminal import Terminal

ALTERNATE, PLAIN = "\x1b[?1049h", "\x1b[?1049l"


def given_back(terminal: Terminal) -> None:
    assert terminal.raw.count(ALTERNATE) == terminal.raw.count(PLAIN) == 1
    assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.index("\x1b[?25l"), "the cursor is gone"
    assert terminal.settings == terminal.before


def limits(stub: FeedStub) -> set[int]:
    return {int(path.partition("limit=")[2]) for path, _ in stub.asked}


def test_keys() -> None:
    with FeedStub() as stub, Terminal("top", "--admin", stub.address, "--interval", "0.2", columns=80) as top:
        stub.state = state(1000)
        shown = top.until(r"by activity[\s\S]*q quit")
        assert "chat-0000" in shown and "1,000 sessions, 2 running" in shown
        assert max(limits(stub)) < 200, "all sessions are asked for, and few are shown"
        top.type("s")
        assert "chat-0999" in top.until(r"by tokens[\s\S]*chat-0999"), "the largest comes first"
        top.type("/0123")
        assert "“0123”" in top.until(r"by tokens, with “0123”[\s\S]*filter: 0123")
        top.type("q")  # part of the filter
        top.until(r"no session matches[\s\S]*filter: 0123q")
        top.type("\x7f\r")
        last = top.until(r"with “0123”[\s\S]*q quit").rpartition("with “0123”")[2]
        assert "chat-0123" in last and "chat-0999" not in last
        top.type("\x1b")
        top.until(r"by tokens\s[\s\S]*chat-0999")
        top.type("j")
        top.until("from 2")
        top.type("q")
        assert top.end() == 0
        given_back(top)


@pytest.mark.parametrize("leave", ["Ctrl-C", "SIGTERM"])
def test_however_it_ends_the_terminal_is_as_it_was(leave: str) -> None:
    with FeedStub() as stub, Terminal("top", "--admin", stub.address, environment={"NO_COLOR": "1"}) as top:
        top.until("q quit")
        if leave == "Ctrl-C":
            top.type("\x03")
        else:
            top.process.send_signal(signal.SIGTERM)
        assert top.end() == (130 if leave == "Ctrl-C" else 143)
        given_back(top)
        assert "Traceback" not in top.raw
        colours = [code for code in top.raw.split("\x1b[") if code[:2] in {f"3{n}" for n in range(1, 8)}]
        assert colours == [], "NO_COLOR"


def test_a_server_that_goes_and_comes_back() -> None:
    with FeedStub() as stub, Terminal("top", "--admin", stub.address, "--interval", "0.2") as top:
        top.until("turns 3.2/s")
        stub.close()
        shown = top.until(r"reconnecting…[\s\S]*q quit")
        assert "turns 3.2/s" in shown, "what was known stays"
        stub.state = state(lately=stub.state["lately"] | {"turns_per_s": 7.5})
        stub.open()
        top.until("turns 7.5/s")
        assert "reconnecting" not in top.until("q quit")
        top.size(60, 24)
        top.until(r"5 sessions[\s\S]*q quit")
        top.type("q")
        assert top.end() == 0
        given_back(top)


def test_keys_do_not_wait_for_the_server() -> None:
    with FeedStub() as stub, Terminal("top", "--admin", stub.address, "--interval", "0.2") as top:
        top.until("by activity")
        stub.answering.clear()
        asked = len(stub.asked)
        while len(stub.asked) == asked:
            top.until("q quit")
        top.type("s")
        top.until("by tokens")
        top.type("s")
        top.until("by device")
        top.type("q")
        assert top.end() == 0
        given_back(top)


def test_ctrl_z_does_not_stop_it() -> None:
    """The shell would get the terminal as it is then. Here is no shell, and the kernel stops nobody without one."""
    with FeedStub() as stub, Terminal("top", "--admin", stub.address) as top:
        top.until("by activity")
        status = Path(f"/proc/{top.process.pid}/status").read_text()
        ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        assert ignored & 1 << (signal.SIGTSTP - 1)
        top.type("q")
        assert top.end() == 0


def test_once_is_one_page() -> None:
    with FeedStub() as stub, Terminal("top", "--admin", stub.address, "--once") as top:
        assert top.end() == 0
        assert ALTERNATE not in top.raw and "chat-0004" in top.raw
        assert len(stub.asked) == 1
