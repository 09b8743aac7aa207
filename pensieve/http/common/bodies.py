"""Reads a request's body within limits and decodes it into a checked struct; large ones in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Final, ParamSpec, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from pensieve.http.common.callers import HOLDER
from pensieve.http.common.failures import HttpFailure
from pensieve.http.common.requests import check_fields, check_nested

EVICT_AFTER_S: Final = 2.0
EVICT_SOON_S: Final = 0.05


class Reservation:
    """Bytes reserved for one body; none at first."""

    def __init__(self, holder: str, abort: Callable[[], None]) -> None:
        """``holder`` names the caller. ``abort`` aborts the reading, which then raises."""
        self.holder = holder
        self.reserved = 0
        self.since = 0.0
        """When it reserved its first byte; the event loop's time."""
        self.is_arriving = True
        self.is_evicted = False
        self.abort = abort


class BodyBudget:
    """Divides ``size`` bytes among the large bodies in flight. Runs on one event loop.

    A caller may use all of it while no other caller needs any. When bytes are short, the body that is overdue
    first is evicted. A body is overdue ``EVICT_SOON_S`` after it began if its caller holds more than an equal share,
    else ``EVICT_AFTER_S`` after. A body that has arrived is never evicted: it waits for this server, not for its
    caller.
    """

    def __init__(self, size: int) -> None:
        self.size = self.free = size
        self._reservations: list[Reservation] = []
        """Reservations with bytes, oldest first."""
        self._bytes_of_holder: Counter[str] = Counter()
        self._changed = asyncio.Event()

    @contextmanager
    def reserve(self, holder: str, abort: Callable[[], None]) -> Iterator[Reservation]:
        """Yield an empty reservation. Its bytes are freed when the block ends."""
        reservation = Reservation(holder, abort)
        try:
            yield reservation
        finally:
            self._free_all(reservation)

    async def acquire(self, reservation: Reservation, size: int) -> None:
        """Reserve ``size`` more bytes. Raises HttpFailure (429) when no body can be evicted for them."""
        while size > self.free:
            loop = asyncio.get_running_loop()
            due = min(
                ((self._due(one, reservation), one) for one in self._rivals(reservation)),
                key=lambda found: found[0],
                default=None,
            )
            if due is None:
                raise _exhausted()
            when, rival = due
            if when <= loop.time():
                rival.is_evicted = True
                self._free_all(rival)
                rival.abort()
                continue
            if rival.holder == reservation.holder and not is_address(reservation.holder):
                raise _exhausted()  # blocked by its own bodies: the caller can wait for them itself
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(when):
                    await self._changed.wait()
        if not reservation.reserved:
            reservation.since = asyncio.get_running_loop().time()
            self._reservations.append(reservation)
        self.free -= size
        reservation.reserved += size
        self._bytes_of_holder[reservation.holder] += size

    def _rivals(self, reservation: Reservation) -> Iterator[Reservation]:
        """Bodies that may be evicted for this one: those of the same caller, and of callers that hold more."""
        own = self._bytes_of_holder[reservation.holder]
        for one in self._reservations:
            more = self._bytes_of_holder[one.holder] > own
            if one is not reservation and one.is_arriving and (more or one.holder == reservation.holder):
                yield one

    def _due(self, one: Reservation, wanting: Reservation) -> float:
        share = self.size // len(self._bytes_of_holder.keys() | {wanting.holder})
        beyond = one.holder != wanting.holder and self._bytes_of_holder[one.holder] > share
        return one.since + (EVICT_SOON_S if beyond else EVICT_AFTER_S)

    def _free_all(self, reservation: Reservation) -> None:
        if not reservation.reserved:
            return
        self._reservations.remove(reservation)
        self.free += reservation.reserved
        self._bytes_of_holder[reservation.holder] -= reservation.reserved
        if not self._bytes_of_holder[reservation.holder]:
            del self._bytes_of_holder[reservation.holder]
        reservation.reserved = 0
        self._changed.set()


def is_address(holder: str) -> bool:
    """Whether the holder is an address. Many callers may share one, so each of its bodies counts for itself."""
    return holder.startswith("@")


def _exhausted() -> HttpFailure:
    return _overloaded("too many large bodies are being received")


def _overloaded(message: str) -> HttpFailure:
    return HttpFailure(429, message, code="server_overloaded", retry_after_s=1.0)


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound=msgspec.Struct)

BODY_TIMEOUT_S: Final = 30.0
SMALL_BYTES: Final = 64 * 1024
"""Bodies up to this size need no reservation, so other bodies never delay them. They are decoded on the event
loop: a round trip to a thread takes as long as decoding them."""
MAX_LARGE_BODIES: Final = 64
"""The budget, in bodies of the largest size. Without it, many slow clients could fill the memory."""
_PATH: Final = re.compile(r" - at `\$\.?(.*)`$")
_MISSING: Final = re.compile(r"Object missing required field `(.*?)`")


class BodyReader:
    """Reads the bodies of all requests. Bounds each body, and the sum of the large ones in flight."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._budget = BodyBudget(MAX_LARGE_BODIES * max_bytes)
        # One: each computing thread makes the event loop wait longer for its turn.
        self._thread = ThreadPoolExecutor(1, "large bodies")

    @property
    def free_bytes(self) -> int:
        return self._budget.free

    async def read(self, request: Request, kind: type[T], convert: Callable[[T], R]) -> R:
        """Decode the body as ``kind`` and return ``convert(body)``.

        Raises HttpFailure: 413 before more than ``max_bytes`` are read, 415 for a compressed body, 429 when the
        budget is used up, 408 for a slow body, 400 for a wrong one.
        """
        limit = asyncio.timeout(None)
        holder = request.scope.get("state", {}).get(HOLDER, "")
        with self._budget.reserve(holder, partial(_expire, limit)) as reservation:
            data = await self._read_bytes(request, reservation, limit)
            reservation.is_arriving = False
            request.state.body_bytes = len(data)
            return await self.offload(request, _decode, data, kind, convert)

    async def offload(self, request: Request, work: Callable[P, R], *args: P.args, **named: P.kwargs) -> R:
        """Return ``work(...)``, which computes from the request's data and touches nothing else. The work of a
        large body runs in a thread, one request at a time, so that other requests' streams go on."""
        if request.state.body_bytes <= SMALL_BYTES:
            return work(*args, **named)
        job = partial(work, *args, **named)
        try:
            done = asyncio.get_running_loop().run_in_executor(self._thread, job)
        except RuntimeError as error:
            raise _overloaded(f"large bodies cannot be read now: {error}") from error
        return await done

    def close(self) -> None:
        """Stop the thread. No large body can be read afterwards."""
        self._thread.shutdown(wait=False)

    async def _read_bytes(self, request: Request, reservation: Reservation, limit: asyncio.Timeout) -> bytes:
        coding = request.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise HttpFailure(
                415, f"a body with content-encoding {coding!r} is not read", code="unsupported_media_type"
            )
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        try:
            async with limit:
                limit.reschedule(asyncio.get_running_loop().time() + BODY_TIMEOUT_S)
                async for part in request.stream():
                    size += len(part)
                    if size > self._max_bytes:
                        raise self._too_large()
                    if size > SMALL_BYTES:
                        await self._budget.acquire(reservation, size - reservation.reserved)
                    parts.append(part)
        except ClientDisconnect:
            raise HttpFailure(
                400, "the client disconnected before the body was complete", code="client_disconnected"
            ) from None
        except TimeoutError:
            if reservation.is_evicted:
                raise _overloaded("the body arrived slowly, and other requests needed its memory") from None
            raise HttpFailure(
                408, f"the body did not come within {BODY_TIMEOUT_S:g} s", code="request_timeout"
            ) from None
        return b"".join(parts)

    def _too_large(self) -> HttpFailure:
        return HttpFailure(413, f"the body is larger than {self._max_bytes} bytes", code="request_too_large")


def _expire(limit: asyncio.Timeout) -> None:
    limit.reschedule(asyncio.get_running_loop().time())


def _decode(data: bytes, kind: type[T], convert: Callable[[T], R]) -> R:
    try:
        body = (
            _decode_without_gc(data, kind)
            if len(data) > SMALL_BYTES
            else msgspec.json.decode(data, type=kind)
        )
    except msgspec.ValidationError as error:
        raise _validation_failure(str(error)) from error
    except RecursionError as error:
        raise HttpFailure(400, "the body is nested too deep", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        problem = str(error).removeprefix("JSON is malformed: ")
        raise HttpFailure(400, f"the body is not valid JSON: {problem}", code="invalid_json") from error
    fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    check_fields(fields, kind)
    found = convert(body)
    # Last, because the checks above say more: a tool of another kind has other fields.
    check_nested(fields, kind)
    return found


_WITHOUT_GC: Final = threading.Lock()
"""One thread at a time: a second one would find collection off, and leave it so. Decoding holds the interpreter
anyway."""


def _decode_without_gc(data: bytes, kind: type[T]) -> T:
    """Decode with garbage collection off. Nothing in a growing document is garbage yet; collections would take
    most of the time, during which no other thread runs."""
    with _WITHOUT_GC:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return msgspec.json.decode(data, type=kind)
        finally:
            if was_on:
                gc.enable()


def _validation_failure(message: str) -> HttpFailure:
    found, missing = _PATH.search(message), _MISSING.match(message)
    # Keys inside an object are not named; the object is.
    param = found.group(1).replace("[...]", "") if found is not None else ""
    if missing is None:
        return HttpFailure(400, message, param=param or None, code="invalid_type")
    param = f"{param}.{missing.group(1)}" if param else missing.group(1)
    return HttpFailure(400, f"{param}: is missing", param=param, code="missing_required_parameter")
