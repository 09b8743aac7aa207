"""Reads a request's body within limits and decodes it into a checked struct; large ones in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
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

PATIENCE_S: Final = 2.0
HASTE_S: Final = 0.05


class Reservation:
    """Bytes reserved for one body; none at first."""

    def __init__(self, holder: str, give_up: Callable[[], None]) -> None:
        """``holder`` names the caller. ``give_up`` aborts the reading, which then raises."""
        self.holder = holder
        self.reserved = 0
        self.since = 0.0
        """When it reserved its first byte; the event loop's time."""
        self.is_arriving = True
        self.is_evicted = False
        self.abort = give_up


class BodyBudget:
    """Divides ``size`` bytes among the large bodies in flight. Runs on one event loop.

    A caller may use all of it while no other caller needs any. When bytes are short, the body that is overdue
    first is evicted. A body is overdue ``HASTE_S`` after it began if its caller holds more than an equal share,
    else ``PATIENCE_S`` after. A body that has arrived is never evicted: it waits for this server, not for its
    caller.
    """

    def __init__(self, size: int) -> None:
        self.size = self.free = size
        self._places: list[Reservation] = []
        """Reservations with bytes, oldest first."""
        self._of_holder: Counter[str] = Counter()
        self._change = asyncio.Event()

    @contextmanager
    def place(self, holder: str, give_up: Callable[[], None]) -> Iterator[Reservation]:
        """Yield an empty reservation. Its bytes are freed when the block ends."""
        place = Reservation(holder, give_up)
        try:
            yield place
        finally:
            self._leave(place)

    async def take(self, place: Reservation, size: int) -> None:
        """Reserve ``size`` more bytes. Raises HttpFailure (429) when no body can be evicted for them."""
        while size > self.free:
            loop = asyncio.get_running_loop()
            due = min(((self._due(one, place), one) for one in self._rivals(place)), key=_when, default=None)
            if due is None:
                raise _full()
            when, rival = due
            if when <= loop.time():
                rival.is_evicted = True
                self._leave(rival)
                rival.abort()
                continue
            if rival.holder == place.holder and not is_address(place.holder):
                raise _full()  # blocked by its own bodies: the caller can wait for them itself
            self._change.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(when):
                    await self._change.wait()
        if not place.reserved:
            place.since = asyncio.get_running_loop().time()
            self._places.append(place)
        self.free -= size
        place.reserved += size
        self._of_holder[place.holder] += size

    def _rivals(self, place: Reservation) -> Iterator[Reservation]:
        """Bodies that may be evicted for this one: those of the same caller, and of callers that hold more."""
        own = self._of_holder[place.holder]
        for one in self._places:
            more = self._of_holder[one.holder] > own
            if one is not place and one.is_arriving and (more or one.holder == place.holder):
                yield one

    def _due(self, one: Reservation, wanting: Reservation) -> float:
        share = self.size // len(self._of_holder.keys() | {wanting.holder})
        beyond = one.holder != wanting.holder and self._of_holder[one.holder] > share
        return one.since + (HASTE_S if beyond else PATIENCE_S)

    def _leave(self, place: Reservation) -> None:
        if not place.reserved:
            return
        self._places.remove(place)
        self.free += place.reserved
        self._of_holder[place.holder] -= place.reserved
        if not self._of_holder[place.holder]:
            del self._of_holder[place.holder]
        place.reserved = 0
        self._change.set()


def is_address(holder: str) -> bool:
    """Whether the holder is an address. Many callers may share one, so each of its bodies counts for itself."""
    return holder.startswith("@")


def _when(due: tuple[float, Reservation]) -> float:
    return due[0]


def evicted_failure() -> HttpFailure:
    return _overloaded("the body arrived slowly, and other requests needed its memory")


def _full() -> HttpFailure:
    return _overloaded("too many large bodies are being received")


def _overloaded(message: str) -> HttpFailure:
    return HttpFailure(429, message, kind="rate_limit_error", code="server_overloaded", retry_after_s=1.0)


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound=msgspec.Struct)

BODY_S: Final = 30.0
SMALL_BYTES: Final = 64 * 1024
"""Bodies up to this size need no reservation, so other bodies never delay them. They are decoded on the event
loop: a round trip to a thread takes as long as decoding them."""
ROOM: Final = 64
"""The budget, in bodies of the largest size. Without it, many slow clients could fill the memory."""
_PATH: Final = re.compile(r" - at `\$\.?(.*)`$")
_MISSING: Final = re.compile(r"Object missing required field `(.*?)`")


class BodyReader:
    """Reads the bodies of all requests. Bounds each body, and the sum of the large ones in flight."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._room = BodyBudget(ROOM * max_bytes)
        # One: each computing thread makes the event loop wait longer for its turn.
        self._thread = ThreadPoolExecutor(1, "large bodies")

    @property
    def free_bytes(self) -> int:
        return self._room.free

    async def read(self, request: Request, kind: type[T], made: Callable[[T], R]) -> R:
        """Decode the body as ``kind`` and return ``made(body)``.

        Raises HttpFailure: 413 before more than ``max_bytes`` are read, 415 for a compressed body, 429 when the
        budget is used up, 408 for a slow body, 400 for a wrong one.
        """
        limit = asyncio.timeout(None)
        holder = request.scope.get("state", {}).get(HOLDER, "")
        with self._room.place(holder, partial(_expire, limit)) as place:
            data = await self._whole(request, place, limit)
            place.is_arriving = False
            request.state.body_bytes = len(data)
            return await self.offload(request, _decoded, data, kind, made)

    async def offload(self, request: Request, work: Callable[P, R], *args: P.args, **named: P.kwargs) -> R:
        """Return ``work(...)``, which computes from the request's data and touches nothing else. The work of a
        large body runs in a thread, one request at a time, so that other requests' streams go on."""
        if request.state.body_bytes <= SMALL_BYTES:
            return work(*args, **named)
        job = partial(work, *args, **named)
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)

    def close(self) -> None:
        """Stop the thread. No large body can be read afterwards."""
        self._thread.shutdown(wait=False)

    async def _whole(self, request: Request, place: Reservation, limit: asyncio.Timeout) -> bytes:
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
                limit.reschedule(asyncio.get_running_loop().time() + BODY_S)
                async for part in request.stream():
                    size += len(part)
                    if size > self._max_bytes:
                        raise self._too_large()
                    if size > SMALL_BYTES:
                        await self._room.take(place, size - place.reserved)
                    parts.append(part)
        except ClientDisconnect:
            raise HttpFailure(
                400, "the client disconnected before the body was complete", code="client_disconnected"
            ) from None
        except TimeoutError:
            if place.is_evicted:
                raise evicted_failure() from None
            raise HttpFailure(
                408, f"the body did not come within {BODY_S:g} s", code="request_timeout"
            ) from None
        return b"".join(parts)

    def _too_large(self) -> HttpFailure:
        return HttpFailure(413, f"the body is larger than {self._max_bytes} bytes", code="request_too_large")


def _expire(limit: asyncio.Timeout) -> None:
    limit.reschedule(asyncio.get_running_loop().time())


def _decoded(data: bytes, kind: type[T], made: Callable[[T], R]) -> R:
    try:
        body = _uncollected(data, kind) if len(data) > SMALL_BYTES else msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong(str(error)) from error
    except RecursionError as error:
        raise HttpFailure(400, "the body is nested too deep", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpFailure(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    check_fields(fields, kind)
    found = made(body)
    check_nested(
        fields, kind
    )  # last, because the checks above say more: a tool of another kind has other fields
    return found


def _uncollected(data: bytes, kind: type[T]) -> T:
    """Decode with garbage collection off. Nothing in a growing document is garbage yet; collections would take
    most of the time, during which no other thread runs."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return msgspec.json.decode(data, type=kind)
    finally:
        if was_on:
            gc.enable()


def _wrong(message: str) -> HttpFailure:
    found, missing = _PATH.search(message), _MISSING.match(message)
    # Keys inside an object are not named; the object is.
    param = found.group(1).replace("[...]", "") if found is not None else ""
    if missing is None:
        return HttpFailure(400, message, param=param or None, code="invalid_type")
    param = f"{param}.{missing.group(1)}" if param else missing.group(1)
    return HttpFailure(400, f"{param}: is missing", param=param, code="missing_required_parameter")
