"""Text that others wrote, made fit for a terminal."""

from __future__ import annotations

import re
from typing import Final

_OBEYED: Final = "\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_IN_LINES: Final = re.compile(f"[{_OBEYED}]")
_IN_A_CELL: Final = re.compile(f"[\t\n{_OBEYED}]")


def clean(text: str, *, lines: bool = True) -> str:
    """``text`` with control characters made visible, so that none reaches a terminal.

    What a model, a server or its callers say could otherwise move the cursor, set the title, write to the clipboard or,
    with marks of writing direction, show another text than it is. What joins letters and emoji, and spaces of any
    width, stay. ``lines``: line ends and tabs stay too.
    """
    return (_IN_LINES if lines else _IN_A_CELL).sub(_visible, text.replace("\r\n", "\n"))


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"<U+{code:04X}>"
