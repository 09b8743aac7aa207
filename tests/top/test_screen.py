"""What ``pensieve top`` draws: at every width the same facts, and nothing that a session may have smuggled in."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from pensieve.cli.top.command import AdminFeed, FeedError, decode
from pensieve.cli.top.screen import ORDERS, TopFrame, View, draw_strip, render
from pensieve.feed import StateDocument
from support.page.feeds import row, state


def told(document: dict[str, Any]) -> StateDocument:
    return decode(json.dumps(document).encode(), "there")


def page(document: dict[str, Any], width: int = 80, height: int | None = None, **look: Any) -> list[str]:
    lines = render(TopFrame(told(document), width, **look), View(page=10_000), height)
    assert max(line.cell_len for line in lines) <= width
    return [line.plain for line in lines]


def words(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("sessions", [0, 5, 1000])
@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_facts_at_every_width(width: int, sessions: int) -> None:
    lines = page(state(sessions), width)
    text = words(lines)
    for fact in (
        "pensieve 9.8.7", "pocket", "cpu float32", "replica left", "serving",
        "turns 3.2/s", "tokens in 400/s", "out 96/s", "failed 2",
        "first token p50 120 ms, p99 720 ms", "per token p50 8.4 ms, p99 14 ms", "in queue p50 1.0 ms, p99 3.0 ms",
        "running 4", "queued 3", "turns waiting 2 (300 ms)", "steps 44/s", "suspensions 17", "engine restarts 1",
        "75 % of 8,192 tokens", "512 reclaimable", "10 % of 16,384 tokens",
        "50 % from the device", "20 % from the host", "10 % recomputed", "20 % new",
        "in 1.5 MB/s", "out 2.5 kB/s", "dropped 120 tokens/s", f"{sessions:,} sessions, {min(sessions, 2)} running",
    ):  # fmt: skip
        assert fact in text, fact
    assert sum("chat-" in line for line in lines) == sessions
    assert ("no session has cached chunks" in text) == (not sessions)
    if sessions:
        (line,) = [line for line in lines if "chat-0001" in line]
        assert "running" in line and "101" in line and ("····▒▒▒▒▒▒▓▓███" in line) == (width >= 60)
        assert ("title=talk 1" in line) == (width >= 110)
    bar = {name: line.count("█") for line in lines for name in ("device", "host") if line.startswith(name)}
    length = sum(line.count("█") + line.count("░") for line in lines if line.startswith("device"))
    assert bar == {"device": round(0.75 * length), "host": round(0.1 * length)}


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_memory_of_an_elastic_tier(width: int) -> None:
    """Held, wanted and the range; a tier of one size needs no line."""
    gib = 1 << 30
    sizes = {"held": 9 * gib, "wanted": 6 * gib, "floor": gib // 2, "ceiling": 60 * gib}
    text = words(page(state(5, device_memory=sizes), width))
    for fact in ("memory", "held 9.00 GiB", "wanted 6.00 GiB", "floor 512.00 MiB", "ceiling 60.00 GiB"):
        assert fact in text, fact
    fixed = state(5, device_memory=dict.fromkeys(sizes, gib))
    assert page(fixed, width) == page(state(5), width)


@pytest.mark.parametrize("size", [(60, 24), (80, 24), (80, 50), (200, 60), (40, 10), (20, 3)])
def test_a_live_screen_fills_the_terminal_and_no_more(size: tuple[int, int]) -> None:
    width, height = size
    view = View()
    lines = render(TopFrame(told(state(1000)), width), view, height)
    assert len(lines) == height and max(line.cell_len for line in lines) <= width
    assert lines[-1].plain.startswith("q quit")
    rows = sum("chat-" in line.plain for line in lines)
    assert rows == view.page or height < 20
    assert width < 60 or rows >= 5


def test_what_is_wrong_is_said() -> None:
    document = state()
    assert "not serving: store down" in words(
        page(document | {"server": document["server"] | {"problem": "store down"}})
    )
    gone = {"sessions": {"total": 0, "running": 0, "age_s": None, "rows": []}}
    assert "no engine" in words(page(document | gone))
    lines = page(document, 80, 30, gone_s=72.0, trouble="cannot connect to there")
    assert "reconnecting… cannot connect to there, for 1m" in words(lines)


def test_the_http_door_is_told_where_there_is_one() -> None:
    document = state()

    def shown(width: int, **door: Any) -> str:
        told = {"state": "serving", "address": "127.0.0.1:8080", "since_s": 1.7e9 - 72, "restarts": 0} | door
        return words(page(document | {"server": document["server"] | {"door": told}}, width))

    assert "http" not in words(page(document))
    for width in (40, 80, 200):
        assert "serving http 127.0.0.1:8080" in shown(width) and "restart " not in shown(width)
        assert "http 127.0.0.1:8080 (1 restart)" in shown(width, restarts=1)
    assert "http 127.0.0.1:8080 hung for 1m (2 restarts)" in shown(80, state="hung", restarts=2)
    evil = shown(200, state="\x1b[2J", address="\x1b[2J")
    assert "\x1b" not in evil


def test_names_are_cut_visibly_and_their_heading_is_not() -> None:
    document = state(1)
    for name, shown in (
        ("ada", "ada    "),
        ("漢字の長い名前です", "漢字の長い …"),
        ("a" * 60, "aaaaaaaaaaa…"),
    ):
        document["sessions"]["rows"] = [row(0, session=f"default/{name}")]
        lines = page(document, 40)
        assert any(line.startswith(f"{shown} ") for line in lines), lines
        assert any(line.startswith("SESSION ") for line in lines)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_windows_and_states_are_counted_after_the_chunks(width: int) -> None:
    document = state(2)
    document["sessions"]["rows"][0]["tail"] = "d30b3h2l5"
    first, second = [line for line in page(document, width) if "chat-" in line]
    assert " +33/2" in first and "+" not in second


def test_a_server_that_tells_less_or_more_is_shown() -> None:
    assert "0 sessions" in words(page({"schema": "pensieve.state/1"}))
    lately = {"lately": {"first_token_s": {"p50": 0.1, "p95": 0.2}, "token_s": None, "something": "new"}}
    text = words(page(state(5, rates=None, **lately)))
    assert "first token p50 100 ms, p95 200 ms" in text and "per token –" in text
    for other in (b"<html>", b"[]", b"{}", b'{"schema": "pensieve.state/2"}'):
        with pytest.raises(FeedError):
            decode(other, "there")


def test_nothing_from_outside_moves_the_cursor() -> None:
    evil = "\x1b[2J\x1b]0;x\x07\r\n\x9b31m"
    document = state(1)
    document["server"] = {key: evil for key in ("version", "model", "replica", "problem", "device", "dtype")}
    document["sessions"]["rows"] = [
        row(0, session=f"default/{evil}", id=evil, labels={evil: evil}, state=evil)
    ]
    for height in (None, 40):
        for line in page(document, 200, height):
            assert line.isprintable(), repr(line)


def drawn(strip: str, width: int) -> str:
    return draw_strip(strip, width, blocks=False).plain


def test_a_strip_that_fits_is_told_chunk_by_chunk() -> None:
    assert drawn("x2h3b1d4i1o1r1n2", 20) == "xxhhhbdddd><rnn"
    shared = draw_strip("D2d1", 5)
    assert shared.plain == "███" and "underline" in str(shared.spans[0].style)
    assert drawn("", 5) == "" and drawn("z3", 5) == "???"


def test_a_longer_one_keeps_its_proportions() -> None:
    assert drawn("x500h300d200", 10) == "xxxxxhhhdd"
    assert drawn("x3d1x3d1", 2) == "xx", "most of its chunks"
    for chunks in range(11, 200, 7):
        assert len(drawn(f"h{chunks}", 10)) == 10
    assert drawn("d1" * 999, 7) == "ddddddd"


def test_sessions_in_other_orders() -> None:
    rows = told(state(6)).sessions.rows
    first = {order: View(order=order).select(rows)[0].session.rpartition("/")[2] for order in ORDERS}
    assert first == {
        "activity": "chat-0000", "tokens": "chat-0005", "device": "chat-0004", "host": "chat-0001",
        "dropped": "chat-0003", "idle": "chat-0005",
    }  # fmt: skip


def test_keys() -> None:
    view = View(page=10)
    rows = told(state(100)).sessions.rows
    view.on_keys("jj\x1b[B\x1b[6~\x1bOAk")
    assert view.first == 11 and view.select(rows)[0].session == "default/chat-0011"
    view.on_keys("g/TALK 4q\x7f")
    assert view.typing and view.filter == "TALK 4" and not view.done
    assert len(view.select(rows)) == 11, "4 and 40 to 49"
    view.on_keys("\r" + "j" * 50)
    assert len(view.select(rows)) == 1 and view.first == 10, "back to where there are any"
    assert view.wanted == 5000
    view.on_keys("\x1b")
    assert (view.filter, view.first, view.done) == ("", 0, False)
    assert view.wanted < 100
    view.on_keys("\x1b[5~\x00\x1b[200~é😀Q")
    assert view.first == 0 and view.done


@pytest.mark.parametrize("colour", [False, True])
def test_without_colours_and_block_characters(colour: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, no_color=not colour, width=80, color_system="standard")
    for line in render(TopFrame(told(state()), 80, blocks=False), View()):
        console.print(line)
    assert ("\x1b[34m" in out.getvalue()) == colour
    told_plain = out.getvalue().replace("–", "-").replace("…", ".")
    assert told_plain.isascii() or not set(told_plain) & set("█▓▒░·")


def test_the_address() -> None:
    assert AdminFeed("[::1]:90").address == "[::1]:90"
