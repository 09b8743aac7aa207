"""Reads a request's body: bounded, then decoded into a checked struct, and a large one beside the event loop."""

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
    """The room of one body. It holds nothing at first."""

    def __init__(self, holder: str, give_up: Callable[[], None]) -> None:
        """``holder`` names the caller. ``give_up`` ends the reading, which then raises."""
        self.holder = holder
        self.reserved = 0
        self.since = 0.0
        """When it began to hold something."""
        self.is_arriving = True
        """The body has not come whole."""
        self.is_evicted = False
        self.abort = give_up


class BodyBudget:
    """Divides ``size`` bytes, for large bodies that are on their way, among the callers. Used on one event loop.

    A caller may fill the room while no other wants it. When room is short, the body that is overdue first is given up:
    soon where its caller holds more than its share, which is the same for all callers that hold or want some; else
    after ``PATIENCE_S``. A body that has come whole is never given up: it waits for this server, not for its caller.
    """

    def __init__(self, size: int) -> None:
        self.size = self.free = size
        self._places: list[Reservation] = []
        """Requests that hold bytes, oldest first."""
        self._of_holder: Counter[str] = Counter()
        self._change = asyncio.Event()

    @contextmanager
    def place(self, holder: str, give_up: Callable[[], None]) -> Iterator[Reservation]:
        """A place for one body; what it holds is free again at the end of the block."""
        place = Reservation(holder, give_up)
        try:
            yield place
        finally:
            self._leave(place)

    async def take(self, place: Reservation, size: int) -> None:
        """Give the place ``size`` more bytes. Raises HttpFailure (429) when there are none."""
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
                raise _full()  # its own bodies are in the way: it may wait for them as it likes
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
        """Bodies that may have to make way: of the same caller, and of those that hold more."""
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
    """Whether the holder is an address: many callers may stand behind one, so each of its bodies counts for itself."""
    return holder.startswith("@")


def _when(due: tuple[float, Reservation]) -> float:
    return due[0]


def evicted_failure() -> HttpFailure:
    """What the caller of a body that made way is told."""
    return _overloaded("the body came slowly, and others wanted its room")


def _full() -> HttpFailure:
    return _overloaded("too many large bodies are on their way")


def _overloaded(message: str) -> HttpFailure:
    return HttpFailure(429, message, kind="rate_limit_error", code="server_overloaded", retry_after_s=1.0)


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound=msgspec.Struct)

BODY_S: Final = 30.0
"""How long a body may take."""
SMALL_BYTES: Final = 64 * 1024
"""Bodies up to here need no room: no number of others keeps them out. They are read on the event loop: the way to a
thread and back takes as long as they do."""
ROOM: Final = 64
"""How many of the largest bodies may be on their way at once; many clients that send slowly would fill the memory."""
_PATH: Final = re.compile(r" - at `\$\.?(.*)`$")
"""Where msgspec says that a value is wrong."""
_MISSING: Final = re.compile(r"Object missing required field `(.*?)`")


class BodyReader:
    """Reads the bodies of all requests: each is bounded, and so are the large ones that are on their way together."""

    def __init__(self, max_bytes: int) -> None:
        """``max_bytes``: of one."""
        self._max_bytes = max_bytes
        self._room = BodyBudget(ROOM * max_bytes)
        # One: each thread that computes lets the event loop wait for its turn as long again.
        self._thread = ThreadPoolExecutor(1, "large bodies")

    @property
    def free_bytes(self) -> int:
        """Bytes that no large body takes yet."""
        return self._room.free

    async def read(self, request: Request, kind: type[T], made: Callable[[T], R]) -> R:
        """What is ``made`` of the body, which is a ``kind``. Raises HttpFailure: 413 before more than ``max_bytes`` are
        read, 415 for a compressed one, 429 when too many others are on their way, 400 for what is wrong."""
        limit = asyncio.timeout(None)
        holder = request.scope.get("state", {}).get(HOLDER, "")
        with self._room.place(holder, partial(_expire, limit)) as place:
            data = await self._whole(request, place, limit)
            place.is_arriving = False
            request.state.body_bytes = len(data)
            return await self.offload(request, _decoded, data, kind, made)

    async def offload(self, request: Request, work: Callable[P, R], *args: P.args, **named: P.kwargs) -> R:
        """The outcome of ``work``, which computes with what has been read of the request and touches nothing else.

        Of a large body it is done in a thread, of one request at a time, so that the streams of others go on.
        """
        if request.state.body_bytes <= SMALL_BYTES:
            return work(*args, **named)
        job = partial(work, *args, **named)
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)

    def close(self) -> None:
        """End the thread. Nothing large is read from then on."""
        self._thread.shutdown(wait=False)

    async def _whole(self, request: Request, place: Reservation, limit: asyncio.Timeout) -> bytes:
        """The body's bytes, read within ``limit``, which is set here."""
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
                400, "the caller left before the body was whole", code="client_disconnected"
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
    check_nested(fields, kind)  # after what says more: a tool of another kind has other fields
    return found


def _uncollected(data: bytes, kind: type[T]) -> T:
    """The decoded body. Nothing of it is garbage yet, and to look for some as it grows would take most of the time, in
    which no thread runs."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return msgspec.json.decode(data, type=kind)
    finally:
        if was_on:
            gc.enable()


def _wrong(message: str) -> HttpFailure:
    found, missing = _PATH.search(message), _MISSING.match(message)
    # A key of an object is not told: the object is.
    param = found.group(1).replace("[...]", "") if found is not None else ""
    if missing is None:
        return HttpFailure(400, message, param=param or None, code="invalid_type")
    param = f"{param}.{missing.group(1)}" if param else missing.group(1)
    return HttpFailure(400, f"{param}: is missing", param=param, code="missing_required_parameter")
