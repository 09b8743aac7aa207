"""Admits a request before any of its body is read: asks the service whether it accepts the caller's credential.

All checks share one connection, so invented keys cost no file descriptors. Answers are cached briefly in
bounded tables.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias, TypeVar

from pensieve.client import AsyncClient, RetryPolicy, ServerInfo
from pensieve.config import DoorSettings
from pensieve.errors import PensieveError, Unauthenticated
from pensieve.http.common.callers import CONNECTIONS, CallerIdentity, closed_error, connection_options
from pensieve.http.common.failures import HttpFailure
from pensieve.rpc_status import TRANSPORT, TRANSPORT_FINAL

T = TypeVar("T")

KEYLESS: Final = "keyless"
"""Feature that a service announces when it asks for no key."""
ACCEPTED_S: Final = 1.0
"""How long an accepted credential needs no other check. The service re-reads its key file as often."""
REFUSED_S: Final = 2.0
"""How long a refused credential stays refused without another check."""
IMMEDIATE_REFUSALS: Final = 10
"""Refusals of one credential that are answered at once within ``REFUSED_S``. Later ones wait until it has
passed, which slows a caller that retries in a loop."""
MAX_CACHED: Final = 4096
MAX_CHECKS: Final = 256
"""Pending checks of unknown credentials. Beyond this the oldest is cancelled: a valid credential is confirmed
in a moment."""
RECHECK_S: Final = 2.0
"""Timeout of the check of a credential that was accepted before. After it the request passes, and the service
decides."""
_PAUSES_S: Final = (0.05, 0.3)


_Check: TypeAlias = "asyncio.Task[ServerInfo | None]"
_Checks: TypeAlias = "dict[bytes, _Check]"


@dataclass(slots=True)
class _Accepted:
    until: float
    info: ServerInfo | None


@dataclass(slots=True)
class _Refused:
    until: float
    error: PensieveError
    refusals: int = 0


class Admission:
    """Checks credentials with the service and caches the answers. Runs on one event loop."""

    def __init__(self, settings: DoorSettings) -> None:
        self._settings = settings
        self._accepted: OrderedDict[bytes, _Accepted] = OrderedDict()
        self._refused: OrderedDict[bytes, _Refused] = OrderedDict()
        self._checks: _Checks = {}
        self._rechecks: _Checks = {}
        """Checks of credentials that were accepted before. Checks of unknown ones cannot displace them."""
        self._closed = False
        self.keyless = False
        """Whether the service has said that it accepts callers without a credential."""

    def has_admitted(self, who: CallerIdentity) -> bool:
        return who.credential in self._accepted

    async def admit(self, who: CallerIdentity) -> None:
        """Return once the service accepts the caller. Raises Unauthenticated, HttpFailure (503) when too many
        checks are pending, the error of an unreachable service, or Cancelled after ``close``."""
        credential = who.credential
        if (accepted := self._accepted.get(credential)) is not None:
            self._accepted.move_to_end(credential)
            if accepted.until > time.monotonic():
                return
        elif (refused := self._refused.get(credential)) is not None and refused.until > time.monotonic():
            refused.refusals += 1
            if refused.refusals > IMMEDIATE_REFUSALS:
                await asyncio.sleep(refused.until - time.monotonic())
            raise refused.error.with_traceback(None)
        checks = self._checks if accepted is None else self._rechecks
        if (check := checks.get(credential)) is None:
            if self._closed:
                raise closed_error()
            if len(self._checks) >= MAX_CHECKS and accepted is None:
                oldest = next(iter(self._checks))
                self._checks.pop(oldest).cancel()
            check = self._start_check(checks, who, credential, known=accepted is not None)
        await asyncio.wait({check})  # shared with other requests: it outlives this one
        if check.cancelled():
            raise closed_error() if self._closed else _overloaded()
        if (error := check.exception()) is not None:
            raise error.with_traceback(None)

    def _start_check(self, checks: _Checks, who: CallerIdentity, credential: bytes, *, known: bool) -> _Check:
        check = asyncio.create_task(self._run(who, credential, known=known))
        checks[credential] = check
        check.add_done_callback(partial(self._on_checked, checks, credential))
        return check

    @staticmethod
    def _on_checked(checks: _Checks, credential: bytes, check: _Check) -> None:
        if checks.get(credential) is check:
            del checks[credential]
        if not check.cancelled():
            check.exception()  # retrieved even when every waiting caller has disconnected

    def close(self) -> None:
        """Cancel all checks. Requests that wait for one end with Cancelled (CLIENT_CLOSED)."""
        self._closed = True
        for check in [*self._checks.values(), *self._rechecks.values()]:
            check.cancel()

    async def _run(self, who: CallerIdentity, credential: bytes, *, known: bool) -> ServerInfo | None:
        try:
            async with AsyncClient(
                self._settings.target,
                tls=self._settings.tls,
                credentials=self._settings.identity,
                timeout=RECHECK_S if known else 60.0,
                retry=RetryPolicy(max_attempts=1),
                options=connection_options(CONNECTIONS),  # its own connection: no caller's requests use it
                metadata=who.metadata,
            ) as client:
                info = await (self._recheck(client) if known else self._check_unknown(client))
        except Unauthenticated as error:
            self._accepted.pop(credential, None)
            _cache(self._refused, credential, _Refused(time.monotonic() + REFUSED_S, error))
            raise
        if info is not None:
            self.keyless = KEYLESS in info.features
        self._refused.pop(credential, None)
        _cache(self._accepted, credential, _Accepted(time.monotonic() + ACCEPTED_S, info))
        return info

    async def _recheck(self, client: AsyncClient) -> ServerInfo | None:
        """Check a credential that was accepted before. Only Unauthenticated refuses it: the service checks
        every call anyway, and callers known before an outage must not queue behind unknown ones."""
        try:
            return await client.server_info()
        except Unauthenticated:
            raise
        except PensieveError:
            return None

    async def _check_unknown(self, client: AsyncClient) -> ServerInfo | None:
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


def _overloaded() -> HttpFailure:
    return HttpFailure(
        503,
        "too many callers wait to be admitted: try again",
        code="server_overloaded",
        retry_after_s=1.0,
    )


def _cache(table: OrderedDict[bytes, T], credential: bytes, value: T) -> None:
    table[credential] = value
    table.move_to_end(credential)
    if len(table) > MAX_CACHED:
        table.popitem(last=False)
