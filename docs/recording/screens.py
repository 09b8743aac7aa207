"""A program on a terminal of its own: what it leaves on the screen, and pictures of that as SVG. Nothing is fetched."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

LIMIT_S = 300.0
_PARTS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+|\x1b")
_HOME, _ERASE, _ABOVE = "\x1b[H", "\x1b[2K", re.compile(r"\x1b\[(\d*)A")
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" class="rich-terminal" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 21px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""rich's own, without the fonts that it would fetch, and with characters as high as a line: bars have no gaps."""


def written(
    command: Sequence[str], columns: int, rows: int, *, keys: str = "", keys_after_s: float = 0.0
) -> str:
    """All that a command writes to a terminal of this size until it ends; ``keys`` are typed after so many seconds.

    Raises CalledProcessError when it fails, TimeoutExpired after ``LIMIT_S``.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env=environment | {"TERM": "xterm-256color", "PYTHONUTF8": "1"},
    )  # fmt: skip
    os.close(theirs)
    found: list[bytes] = []

    def read() -> None:
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # Linux says so when nobody has the other end any more
                return
            if not data:
                return
            found.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        if keys:
            time.sleep(keys_after_s)
            os.write(ours, keys.encode())
        status = process.wait(LIMIT_S)
    except BaseException:
        process.kill()
        raise
    finally:
        process.wait()
        reader.join()
        os.close(ours)
    if status:
        raise subprocess.CalledProcessError(status, list(command))
    return b"".join(found).decode("utf-8", "replace")


def left_on_screen(raw: str) -> list[str]:
    """Lines as they stand in the end, with their colours. Understood is what rich's live displays do: whole lines are
    erased and written again.
    """
    lines, at = [""], 0
    for part in _PARTS.findall(raw):
        above = _ABOVE.fullmatch(part)
        if part == "\n":
            at += 1
            lines += [""] * (at + 1 - len(lines))
        elif above is not None:
            at = max(at - int(above[1] or 1), 0)
        elif part == _ERASE:
            lines[at] = ""
        elif part.endswith("m") or part[0] not in "\x1b\r":
            lines[at] += part
    return lines


def frames(raw: str) -> list[list[str]]:
    """All whole pictures of a program that has the screen to itself, as ``pensieve top`` has, one after the other."""
    return [left_on_screen(frame) for frame in raw.partition("\x1b[?1049l")[0].split(_HOME)[1:]]


def plain(line: str) -> str:
    """A line without its colours."""
    return Text.from_ansi(line).plain


def picture(lines: Sequence[str], columns: int, title: str) -> str:
    """The lines in a window, as SVG."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, highlight=False)
    for line in lines:
        console.print(Text.from_ansi(line), no_wrap=True, overflow="crop")
    svg = console.export_svg(title=title, code_format=_SVG, unique_id="t")
    # Characters as wide as their cells in whatever font there is: bars have no gaps then.
    svg = svg.replace('textLength="', 'lengthAdjust="spacingAndGlyphs" textLength="')
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"
