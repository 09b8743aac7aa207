"""The server's end of the process that compiles grammars, and the limits that are checked before."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import math
import re
import signal
import sys
from collections import OrderedDict, defaultdict
from itertools import accumulate
from typing import Any, Final

from pensieve.debug import child_environment
from pensieve.errors import Internal, ResourceExhausted
from pensieve.frames import HEADER, FrameError, decode, decoder_for, encode_frame, frame_length
from pensieve.server.child import ChildProcess
from pensieve.server.grammars.process import Checked, CheckGrammar

MAX_BYTES: Final = 64 * 1024
"""Size of a schema, a pattern, a grammar or a list of choices, as UTF-8."""
MAX_TOTAL_BYTES: Final = 256 * 1024
"""Size of all grammars of one answer together: its form, and the arguments of the functions that it may call."""
MAX_DEPTH: Final = 100
"""Objects and arrays within each other."""
MAX_CHOICES: Final = 4096
_NO_BRACKETS: Final = re.compile(r'(?:"(?:[^"\\]|\\.)*+"?|[^"\[\]{}]++)++', re.DOTALL)
_STEPS: Final = {"[": 1, "{": 1, "]": -1, "}": -1}


def parse_schema(text: str) -> dict[str, Any] | bool:
    """Parse a JSON schema. Raises ValueError with the problem."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES} bytes")
    if is_too_deep(text):
        raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")
    try:
        found = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"has a number that is not JSON or too large: {error}") from error
    if not isinstance(found, dict | bool):
        raise ValueError("must be a JSON object")
    if isinstance(found, dict) and "x-guidance" in found:
        raise ValueError("the keyword 'x-guidance' is not supported")
    return found


def is_too_deep(text: str) -> bool:
    """Whether a text that may be JSON has more than ``MAX_DEPTH`` brackets open."""
    # No loop of Python: the event loop waits for this, and 64 KiB may be brackets alone.
    brackets = _NO_BRACKETS.sub("", text)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > MAX_DEPTH


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(text)
    return number


def _refuse_constant(name: str) -> float:
    raise ValueError(name)


MAX_KEPT: Final = 4096
"""Grammars whose check is remembered."""
_PATIENCE_S: Final = 30.0
"""Time for one answer. Processor time is limited far below: this is for a machine that stands still."""
TOO_COSTLY: Final = "takes too much time or memory to compile"
NOT_INSTALLED: Final = (
    "this server cannot follow one: llguidance is not installed: pip install 'pensieve[server]'"
)
_BY_COST: Final = frozenset(
    {-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGILL, -signal.SIGTRAP}
)
"""Exit statuses of a process that a grammar has ended: by its limits, or by a stack or an allocator that gave up. Not
SIGKILL: it comes from here after ``_PATIENCE_S``, or from a system without memory, and such a grammar may be good."""

_decoder = decoder_for(Checked)


class _Compiler(ChildProcess):
    async def ask(self, text: str) -> Checked:
        """Raises ConnectionError or EOFError when the process has ended, FrameError for an answer of another kind."""
        self._writer.write(encode_frame(CheckGrammar(text)))
        await self._writer.drain()
        length = frame_length(await self._reader.readexactly(HEADER.size))
        found: Checked = decode(await self._reader.readexactly(length), _decoder)
        return found


class GrammarChecker:
    """Checks grammars, each once. The process is started for the first. Used on one event loop."""

    def __init__(self) -> None:
        self._compiler: _Compiler | None = None
        self._kept: OrderedDict[bytes, str | None] = OrderedDict()
        self._lock = asyncio.Lock()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One per tenant: the grammars of one that has many do not stand before those of others."""

    @staticmethod
    def installed() -> bool:
        return importlib.util.find_spec("llguidance") is not None

    async def problem(self, tenant: str, text: str) -> str | None:
        """Return the problem of a grammar, given as the ``grammar_text`` of one part; None: it has none. Raises
        Internal when it cannot be checked, ResourceExhausted when it cannot be now."""
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest not in self._kept:
            async with self._locks[tenant], self._lock:
                if digest not in self._kept:
                    self._kept[digest] = await self._compile(text)
        self._kept.move_to_end(digest)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return self._kept[digest]

    async def close(self) -> None:
        async with self._lock:
            if self._compiler is not None:
                await self._end(self._compiler)

    async def _compile(self, text: str) -> str | None:
        if self._compiler is None:
            try:
                self._compiler = await _Compiler.launch(_command, child_environment(failpoints=False))
            except OSError as error:  # no descriptor is free, or no process
                raise ResourceExhausted(
                    f"formats cannot be checked now: {error.strerror}", retry_after_s=1.0
                ) from error
        compiler = self._compiler
        try:
            async with asyncio.timeout(_PATIENCE_S):
                found = (await compiler.ask(text)).problem
        except (ConnectionError, EOFError, TimeoutError, FrameError) as error:
            status = await self._end(compiler)
            if status in _BY_COST:
                return TOO_COSTLY
            raise Internal(f"the process that checks grammars {compiler.describe_exit(status)}") from error
        except BaseException:
            # Its answer would be read as that to the next question.
            await self._end(compiler)
            raise
        return None if found is None else (f"{found[1]}: {found[0]}" if found[1] else found[0])

    async def _end(self, compiler: _Compiler) -> int:
        self._compiler = None
        compiler.kill()
        return await compiler.wait()


def _command(fd: int) -> list[str]:
    return [sys.executable, "-P", "-m", "pensieve.server.grammars.process", str(fd)]
