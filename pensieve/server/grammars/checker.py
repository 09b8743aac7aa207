"""The server's end of the process that compiles grammars."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import logging
import signal
import sys
from collections import OrderedDict, defaultdict
from typing import Final

from pensieve.debug import child_environment
from pensieve.errors import Internal
from pensieve.frames import HEADER, FrameError, decode, decoder_for, encode_frame, frame_length
from pensieve.server.child import ChildProcess
from pensieve.server.grammars.process import Checked, CheckGrammar

log = logging.getLogger(__name__)

MAX_KEPT: Final = 4096
"""Grammars whose check is remembered."""
_PATIENCE_S: Final = 30.0
"""Time for one answer. Processor time is limited far below: this is for a machine that stands still."""
TOO_COSTLY: Final = "takes too much time or memory to compile"
NOT_INSTALLED: Final = (
    "this server cannot follow one: llguidance is not installed: pip install 'pensieve[server]'"
)
_BY_COST: Final = frozenset(
    {-signal.SIGPROF, -signal.SIGKILL, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGILL, -signal.SIGTRAP}
)
"""Exit statuses of a process that a grammar has ended: by its limits, or by a stack or an allocator that gave up."""

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
        Internal when it cannot be checked."""
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
            self._compiler = await _Compiler.launch(_command, child_environment(failpoints=False))
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
