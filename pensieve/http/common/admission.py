"""Admits a request before any of its body is read: asks the service whether it accepts the caller's credential.

All checks share one connection, so invented keys cost no file descriptors. Answers are cached briefly in
bounded tables.
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
"""Feature that a service announces when it asks for no key."""
GOOD_S: Final = 1.0
"""How long an accepted credential needs no other check. The service re-reads its key file as often."""
BAD_S: Final = 2.0
"""How long a refused credential stays refused without another check."""
PATIENT_REFUSALS: Final = 10
"""Refusals of one credential that are answered at once within ``REFUSED_S``. Later ones wait until it has
passed, which slows a caller that retries in a loop."""
REMEMBERED: Final = 4096
MOST_QUESTIONS: Final = 256
"""Pending checks of unknown credentials. Beyond this the oldest is cancelled: a valid credential is confirmed
in a moment."""
RECHECK_S: Final = 2.0
"""Timeout of the check of a credential that was accepted before. After it the request passes, and the service
decides."""
_PAUSES_S: Final = (0.05, 0.3)


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
    """Checks credentials with the service and caches the answers. Runs on one event loop."""

    def __init__(self, settings: DoorSettings) -> None:
        self._settings = settings
        self._good: OrderedDict[bytes, _Good] = OrderedDict()
        self._bad: OrderedDict[bytes, _Bad] = OrderedDict()
        self._questions: _Questions = {}
        self._rechecks: _Questions = {}
        """Checks of credentials that were accepted before. Checks of unknown ones cannot displace them."""
        self._closed = False
        self.keyless = False
        """Whether the service has said that it accepts callers without a credential."""

    def has_admitted(self, who: CallerIdentity) -> bool:
        return who.credential in self._good

    async def admit(self, who: CallerIdentity) -> None:
        """Return once the service accepts the caller. Raises Unauthenticated, HttpFailure (503) when too many
        checks are pending, the error of an unreachable service, or Cancelled after ``close``."""
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
        await asyncio.wait({question})  # shared with other requests: it outlives this one
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
            question.exception()  # retrieved even when every waiting caller has disconnected

    def close(self) -> None:
        """Cancel all checks. Requests that wait for one end with Cancelled (CLIENT_CLOSED)."""
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
        """Check a credential that was accepted before. Only Unauthenticated refuses it: the service checks
        every call anyway, and callers known before an outage must not queue behind unknown ones."""
        try:
            return await client.server_info()
        except Unauthenticated:
            raise
        except PensieveError:
            return None

    async def _found_out(self, client: AsyncClient) -> ServerInfo | None:
        """Check an unknown credential, retrying while the service cannot be reached."""
        deadline = time.monotonic() + self._settings.patience_s
        while True:
            try:
                return await client.server_info()
            except Unauthenticated:
                raise
            except PensieveError as error:
                if error.reason not in (TRANSPORT, TRANSPORT_FINAL):
                    return None  # the service checks the credential before anything else
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
            options=connection(CONNECTIONS),  # its own connection: no caller's requests use it
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
        "too many callers wait to be admitted: try again",
        kind="server_error",
        code="server_overloaded",
        retry_after_s=1.0,
    )


def _remember(table: OrderedDict[bytes, T], credential: bytes, value: T) -> None:
    table[credential] = value
    table.move_to_end(credential)
    if len(table) > REMEMBERED:
        table.popitem(last=False)
