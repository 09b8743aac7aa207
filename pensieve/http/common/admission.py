"""Lets a request in before anything of its body is read: the service is asked first whether it knows the caller.

The question goes over one connection that all callers share, so that an invented key costs no file. Each answer is
remembered for a moment, in a bounded table.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias, TypeVar

from pensieve.client import AsyncClient, RetryPolicy, ServerInfo
from pensieve.errors import Cancelled, PensieveError, Unauthenticated
from pensieve.http.common.callers import CONNECTIONS, CallerIdentity, connection
from pensieve.http.common.failures import HttpFailure
from pensieve.http.common.settings import DoorSettings
from pensieve.rpc_status import TRANSPORT, TRANSPORT_FINAL

T = TypeVar("T")

KEYLESS: Final = "keyless"
"""What a server that asks for no key says among its features."""
GOOD_S: Final = 1.0
"""How long a credential counts as good without another question. The service looks at its key file as often."""
BAD_S: Final = 2.0
"""How long a credential counts as bad."""
PATIENT_REFUSALS: Final = 10
"""Refusals of one bad credential that are given at once in ``BAD_S``; later ones wait until that time is over, so that
a caller who tries again and again has no more than these."""
REMEMBERED: Final = 4096
"""Credentials, good and bad ones each."""
MOST_QUESTIONS: Final = 256
"""Questions that wait for an answer. Of more, the oldest is given up: a good credential is confirmed in a moment."""
RECHECK_S: Final = 2.0
"""How long the service may take to confirm a credential that was good before; then the service itself decides."""
_PAUSES_S: Final = (0.05, 0.3)
"""Bounds of the random pause before an unreachable service is asked again."""


_Question: TypeAlias = "asyncio.Task[ServerInfo | None]"
_Questions: TypeAlias = "dict[bytes, _Question]"


@dataclass(slots=True)
class _Good:
    until: float
    info: ServerInfo | None


@dataclass(slots=True)
class _Bad:
    until: float
    error: PensieveError
    refusals: int = 0


class Admission:
    """Asks the service about credentials, and remembers the answers. One event loop."""

    def __init__(self, settings: DoorSettings) -> None:
        self._settings = settings
        self._good: OrderedDict[bytes, _Good] = OrderedDict()
        self._bad: OrderedDict[bytes, _Bad] = OrderedDict()
        self._questions: _Questions = {}
        """About credentials that are not known."""
        self._rechecks: _Questions = {}
        """About credentials that were good before: no stranger's question takes their place."""
        self._closed = False
        self.keyless = False
        """Whether the service lets in callers without a credential, as far as it has said so."""

    def has_admitted(self, who: CallerIdentity) -> bool:
        """Whether the service has let in this credential before."""
        return who.credential in self._good

    async def admit(self, who: CallerIdentity) -> None:
        """Return when the service knows the caller.

        Raises Unauthenticated, what a service that cannot be reached ends with, or Cancelled after ``close``.
        """
        credential = who.credential
        if (good := self._good.get(credential)) is not None:
            self._good.move_to_end(credential)
            if good.until > time.monotonic():
                return
        elif (bad := self._bad.get(credential)) is not None and bad.until > time.monotonic():
            bad.refusals += 1
            if bad.refusals > PATIENT_REFUSALS:
                await asyncio.sleep(bad.until - time.monotonic())
            raise bad.error.with_traceback(None)
        questions = self._questions if good is None else self._rechecks
        if (question := questions.get(credential)) is None:
            if self._closed:
                raise _closed()
            if len(self._questions) >= MOST_QUESTIONS and good is None:
                oldest = next(iter(self._questions))
                self._questions.pop(oldest).cancel()
            question = self._start(questions, who, credential, known=good is not None)
        await asyncio.wait({question})  # others may wait for it, too: it outlives this request
        if question.cancelled():
            raise _closed() if self._closed else _too_many()
        if (error := question.exception()) is not None:
            raise error.with_traceback(None)

    def _start(
        self, questions: _Questions, who: CallerIdentity, credential: bytes, *, known: bool
    ) -> _Question:
        question = asyncio.create_task(self._ask(who, credential, known=known))
        questions[credential] = question
        question.add_done_callback(partial(self._answered, questions, credential))
        return question

    @staticmethod
    def _answered(questions: _Questions, credential: bytes, question: _Question) -> None:
        if questions.get(credential) is question:
            del questions[credential]
        if not question.cancelled():
            question.exception()  # seen, also where every caller that waited has left

    def close(self) -> None:
        """Ask nothing more. Requests that wait for an answer end with Cancelled (CLIENT_CLOSED)."""
        self._closed = True
        for question in [*self._questions.values(), *self._rechecks.values()]:
            question.cancel()

    async def _ask(self, who: CallerIdentity, credential: bytes, *, known: bool) -> ServerInfo | None:
        try:
            async with self._client(who, RECHECK_S if known else 60.0) as client:
                info = await (self._confirmed(client) if known else self._found_out(client))
        except Unauthenticated as error:
            self._good.pop(credential, None)
            _remember(self._bad, credential, _Bad(time.monotonic() + BAD_S, error))
            raise
        if info is not None:
            self.keyless = KEYLESS in info.features
        self._bad.pop(credential, None)
        _remember(self._good, credential, _Good(time.monotonic() + GOOD_S, info))
        return info

    async def _confirmed(self, client: AsyncClient) -> ServerInfo | None:
        """Ask about a credential that was good before. Only a clear no counts: the service hears of each call anyway,
        and who called before an outage is not to queue behind strangers."""
        try:
            return await client.server_info()
        except Unauthenticated:
            raise
        except PensieveError:
            return None

    async def _found_out(self, client: AsyncClient) -> ServerInfo | None:
        """Ask about an unknown credential until the service can be reached."""
        deadline = time.monotonic() + self._settings.patience_s
        while True:
            try:
                return await client.server_info()
            except Unauthenticated:
                raise
            except PensieveError as error:
                if error.reason not in (TRANSPORT, TRANSPORT_FINAL):
                    return None  # the service looked at the credential before it said anything else
                pause = random.uniform(*_PAUSES_S)
                if time.monotonic() + pause >= deadline:
                    raise
            await asyncio.sleep(pause)

    @asynccontextmanager
    async def _client(self, who: CallerIdentity, timeout_s: float) -> AsyncIterator[AsyncClient]:
        client = AsyncClient(
            self._settings.target,
            tls=self._settings.tls,
            timeout=timeout_s,
            retry=RetryPolicy(max_attempts=1),
            options=connection(CONNECTIONS),  # a number of its own: no caller's calls go over it
            metadata=who.metadata,
        )
        try:
            yield client
        finally:
            await client.close()


def _closed() -> Cancelled:
    return Cancelled("the door is closed", reason="CLIENT_CLOSED")


def _too_many() -> HttpFailure:
    return HttpFailure(
        503,
        "too many callers wait to be let in: try again",
        kind="server_error",
        code="server_overloaded",
        retry_after_s=1.0,
    )


def _remember(table: OrderedDict[bytes, T], credential: bytes, value: T) -> None:
    table[credential] = value
    table.move_to_end(credential)
    if len(table) > REMEMBERED:
        table.popitem(last=False)
